"""What the chart renders, from values as they are shipped. Needs Helm."""

import json
import re
from datetime import timedelta

import pytest
import yaml
from flytekit.configuration import AuthType, PlatformConfig
from kubernetes.client import V1NodeSpec, V1NodeStatus, V1ObjectMeta

from strata_platform.backends.kubernetes_objects import JOB_SET, SHAPE
from strata_platform.chart import node_health, queue_timeout, removal, retention
from strata_platform.chart.cluster_test import Cluster
from strata_platform.chart.node_health import TAINT
from strata_platform.estimate.prices import CONFIG_MAP, KEY, Price, parse_prices
from strata_platform.queue_shares import Shares
from strata_platform.spec import RunSpec
from tasks.runtime.warmup import store
from tests.charts.conftest import CHART, HELM, PRESETS
from tests.charts.helpers.promql import read
from tests.charts.helpers.wrong_values import REFUSED_BY_THE_SCHEMA, REFUSED_BY_THE_TEMPLATES

if HELM is None:
    pytest.skip("there is no helm on the PATH; put it there, or its path into HELM", allow_module_level=True)

NAMES = [path.stem.removesuffix("-values") for path in PRESETS]


@pytest.fixture(scope="module")
def rendered(helm):
    """The objects of each preset."""
    return {name: helm.render("--values", path) for name, path in zip(NAMES, PRESETS, strict=True)}


def of_kind(objects, kind):
    return [item for item in objects if item["kind"] == kind]


@pytest.mark.parametrize("path", [CHART / "values.yaml", *PRESETS], ids=lambda path: path.stem)
def test_lint_has_nothing_to_say(helm, path):
    done = helm("lint", "--strict", CHART, "--values", path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", REFUSED_BY_THE_SCHEMA)
def test_wrong_values_are_refused_with_the_key(helm, tmp_path, case):
    text, *said = REFUSED_BY_THE_SCHEMA[case]
    (tmp_path / "wrong.yaml").write_text(text)
    done = helm.template("--values", tmp_path / "wrong.yaml")
    assert done.returncode and any(all(part in line for part in said) for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize("case", REFUSED_BY_THE_TEMPLATES)
def test_contradictions_are_refused_with_the_way_out(helm, tmp_path, case):
    text, *said = REFUSED_BY_THE_TEMPLATES[case]
    (tmp_path / "wrong.yaml").write_text(f"image: {{repository: x}}\n{text}" if "image:" not in text else text)
    done = helm.template("--values", tmp_path / "wrong.yaml")
    assert done.returncode and all(part in done.stderr for part in said), done.stderr


def test_values_that_look_like_refused_ones_are_taken(helm, tmp_path):
    cidrs = [
        "fd00::/64",
        "::/0",
        "2001:db8::1/128",
        "::1/128",
        "0.0.0.0/0",
        "10.0.0.1/32",
        "10.20.48.0/20",
        "fe80::/10",
    ]
    cidrs += ["1:2:3:4:5:6:7:8/128", "1:2:3:4:5:6:7::/112", "FD00:ABCD::/32", "2001:db8:0:8000::/49", "192.168.0.0/16"]
    paths = ["/device", "/data/dev", "/system", "/opt/strata-data", "/usr", "/devices/shm", "/process"]
    devices = {"rdma/hca_shared_devices_a": 1, "amd.com/cpx_nps4": 8, "nvidia.com/mig-3g.40gb": 1, "example/disk": 1}
    devices |= {"ephemeral-storage": "1Ti", "hugepages-1Gi": "8Gi", "deviceclass.resource.kubernetes.io/gpu.example": 1}
    bounds = {"cpu": 64, "memory": "1Ti", **devices}
    tenant = {
        "project": "system", "domains": ["development"], "limits": {"max": bounds},
        "labels": {"app.example.com/part-of": "x", "helm.sh.example/chart": "x", "managed-by": "x"},
        "network": {"others": [{"cidr": cidr} for cidr in cidrs]},
        "podTemplate": {"labels": {"app.kubernetes.io/part-of": "x"}, "env": {"TRITON_CACHE": "x"}, "volumes": [
            {"name": f"v{number}", "claim": "c", "mountPath": path} for number, path in enumerate(paths)]},
    }  # fmt: skip
    quotas = {name: {"nominal": value} for name, value in {**bounds, "pods": 8}.items()}
    queue = {"name": "q", "quotas": [{"flavor": "f", "resources": quotas}]}
    values = UNQUEUED | {"tenants": [tenant, {"project": "kubeflow", "domains": ["development"]}]}
    values |= {"queues": {"required": False, "flavors": [{"name": "f"}], "clusterQueues": [queue]}}
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    objects = helm.render("--values", tmp_path / "values.yaml")
    (policy,) = [
        item for item in of_kind(objects, "NetworkPolicy")
        if item["metadata"]["name"] == "strata-default" and item["metadata"]["namespace"] == "system-development"
    ]  # fmt: skip
    found = [to["ipBlock"]["cidr"] for rule in policy["spec"]["egress"] for to in rule["to"] if "ipBlock" in to]
    assert found == cidrs


def test_the_defaults_make_nothing(helm):
    assert helm.render() == []


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_labeled_and_no_two_have_one_name(rendered, name):
    objects = rendered[name]
    assert objects
    names = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    assert all(item["metadata"]["labels"]["app.kubernetes.io/instance"] == "strata" for item in objects)


@pytest.mark.parametrize("name", NAMES)
def test_every_tenant_has_every_piece(rendered, name):
    values = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    kinds = {"ServiceAccount", "LimitRange", "PodTemplate", "LocalQueue", "ConfigMap"}
    kinds |= {"Namespace", "NetworkPolicy"} if name != "objects-elsewhere" else set()
    kinds |= {"Job"} if name in ("teams", "amd") else set()
    for tenant in values["tenants"]:
        for domain in tenant["domains"]:
            namespace = f"{tenant['project']}-{domain}"
            own = {
                item["kind"]
                for item in rendered[name]
                if namespace in (item["metadata"].get("namespace"), item["metadata"]["name"])
                and "helm.sh/hook" not in item["metadata"].get("annotations", {})
            }
            wanted = kinds | ({"ResourceQuota"} if tenant.get("quota") else set())
            wanted |= {"Role", "RoleBinding"}
            assert own == wanted


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_what_the_restricted_level_allows(rendered, name):
    for template in of_kind(rendered[name], "PodTemplate"):
        assert_restricted(template["template"]["spec"])
    for pod in of_kind(rendered[name], "Pod"):
        assert_restricted(pod["spec"])
    for namespace in of_kind(rendered[name], "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def assert_restricted(spec):
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim"} for volume in spec.get("volumes", []))
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert "add" not in security["capabilities"]


def test_the_template_leaves_shared_memory_to_the_run(rendered):
    # Flyte refuses a task that asks for shared memory when something is mounted at /dev/shm already.
    for template in of_kind(rendered["teams"], "PodTemplate"):
        (container,) = template["template"]["spec"]["containers"]
        assert container["name"] == "default"
        assert all(mount["mountPath"] != "/dev/shm" for mount in container["volumeMounts"])


def test_a_tenant_differs_from_the_defaults_key_by_key(rendered):
    templates = of_kind(rendered["teams"], "PodTemplate")
    for template in templates:
        (container,) = template["template"]["spec"]["containers"]
        assert {"name": "HF_ENDPOINT", "value": "http://mirror.hub-mirror:8080"} in container["env"]
    limits = {
        item["metadata"]["namespace"]: item["spec"]["limits"][0] for item in of_kind(rendered["teams"], "LimitRange")
    }
    assert limits["speech-development"]["max"] == {"cpu": 64, "memory": "1Ti"}
    assert limits["speech-development"]["default"] == limits["language-production"]["default"]
    assert "max" not in limits["language-production"]


UNQUEUED = {"image": {"repository": "x"}, "queues": {"required": False}}


def test_limits_that_all_fit_into_are_taken(helm, tmp_path):
    own = {"default": {"cpu": "8000m"}, "max": {"cpu": 8, "memory": "34359738368", "nvidia.com/gpu": 8}}
    tenant = {"project": "p", "domains": ["d"], "limits": own}
    (tmp_path / "values.yaml").write_text(json.dumps(UNQUEUED | {"tenants": [tenant]}))
    (limits,) = of_kind(helm.render("--values", tmp_path / "values.yaml"), "LimitRange")
    assert limits["spec"]["limits"][0]["max"] == own["max"]


def test_pods_have_the_labels_that_an_identity_asks_for(helm, tmp_path):
    (tmp_path / "values.yaml").write_text(
        """
        image: {repository: x}
        queues: {required: false}
        tenantDefaults: {podTemplate: {labels: {azure.workload.identity/use: "true", strata/tenant: other}}}
        tenants: [{project: p, domains: [d], podTemplate: {labels: {team: p}, variants: [{name: fast}]}}]
        """
    )
    objects = helm.render("--values", tmp_path / "values.yaml")
    given = {"azure.workload.identity/use": "true", "team": "p", "strata/tenant": "p-d"}
    templates = of_kind(objects, "PodTemplate")
    assert [template["template"]["metadata"]["labels"] for template in templates] == [given] * 2
    # The pod that looks around for `helm test` is to have what runs have.
    (pod,) = [pod for pod in of_kind(objects, "Pod") if pod["metadata"]["namespace"] == "p-d"]
    assert given.items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "strata"


def test_pods_reach_what_is_listed_and_each_other_in_jobs_alone(rendered):
    policies = of_kind(rendered["teams"], "NetworkPolicy")
    own = {
        item["metadata"]["name"]: item["spec"]
        for item in policies
        if item["metadata"]["namespace"] == "speech-development"
    }
    default = own["strata-default"]
    assert default["podSelector"] == {} and default["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in default
    ports = [[port["port"] for port in rule["ports"]] for rule in default["egress"]]
    assert ports == [[53, 53], [443], [8080]]
    assert default["egress"][1]["to"] == [{"ipBlock": {"cidr": "10.20.0.0/16"}}]
    labels = {"strata-job": "training.kubeflow.org/job-name", "strata-jobset": "jobset.sigs.k8s.io/jobset-name"}
    for name, label in labels.items():
        of_jobs = {"matchExpressions": [{"key": label, "operator": "Exists"}]}
        assert own[name]["podSelector"] == of_jobs
        assert own[name]["ingress"] == [{"from": [{"podSelector": of_jobs}]}]
        assert own[name]["egress"] == [{"to": [{"podSelector": of_jobs}]}]


def test_members_may_look_and_nothing_else(rendered):
    roles = [item for item in of_kind(rendered["teams"], "Role") if item["metadata"]["name"] == "strata-member"]
    assert len(roles) == 3
    for role in roles:
        assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in role["rules"])
        assert all("secrets" not in rule["resources"] and "*" not in rule["resources"] for rule in role["rules"])


def test_submitters_alone_may_start_and_cancel_what_runs_without_flyte(rendered):
    own = [item for item in rendered["teams"] if item["metadata"].get("namespace") == "language-development"]
    roles = {role["metadata"]["name"]: role["rules"] for role in of_kind(own, "Role")}
    assert roles["strata-submitter"] == [
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["create", "patch"]},
        {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["patch"]},
    ]
    subjects = {
        item["roleRef"]["name"]: [each["name"] for each in item["subjects"]] for item in of_kind(own, "RoleBinding")
    }
    assert subjects["strata-submitter"] == ["language-leads"]
    # They read what members read.
    assert subjects["strata-member"] == ["language", "language-leads"]
    others = [item for item in rendered["teams"] if item["metadata"].get("namespace") == "speech-development"]
    assert "strata-submitter" not in [role["metadata"]["name"] for role in of_kind(others, "Role")]


def test_a_pod_template_names_the_image_of_runs_without_flyte(rendered, helm):
    for template in of_kind(rendered["teams"], "PodTemplate"):
        image = template["metadata"]["annotations"]["strata/image"]
        assert image in [
            job["spec"]["template"]["spec"]["containers"][0]["image"] for job in of_kind(rendered["teams"], "Job")
        ]
    off = "tests.enabled=false,removal.enabled=false,queues.required=false"
    without = helm.render("--set", f"tenants[0].project=p,tenants[0].domains={{d}},{off}")
    assert all("annotations" not in template["metadata"] for template in of_kind(without, "PodTemplate"))


def test_prices_are_a_table_that_estimate_reads_and_members_may_see(rendered):
    tables = [item for item in of_kind(rendered["teams"], "ConfigMap") if item["metadata"]["name"] == CONFIG_MAP]
    assert len(tables) == 3
    for table in tables:
        assert parse_prices(table["data"][KEY], "it").of("h200") == Price(3.5, "USD")
    for role in of_kind(rendered["teams"], "Role"):
        if role["metadata"]["name"] == "strata-member":
            (rule,) = [rule for rule in role["rules"] if "configmaps" in rule["resources"]]
            assert CONFIG_MAP in rule["resourceNames"]
    assert all(item["metadata"]["name"] != CONFIG_MAP for item in of_kind(rendered["rdma"], "ConfigMap"))


def test_runs_have_no_token_and_no_rights(rendered):
    for name in NAMES:
        accounts = [item for item in of_kind(rendered[name], "ServiceAccount") if item["metadata"]["name"] == "strata"]
        assert accounts and all(item["automountServiceAccountToken"] is False for item in accounts)
        for binding in of_kind(rendered[name], "RoleBinding") + of_kind(rendered[name], "ClusterRoleBinding"):
            assert all(subject["name"] != "strata" for subject in binding["subjects"])


def test_queues_draw_on_flavors_in_the_order_given(rendered):
    (queue,) = [item for item in of_kind(rendered["teams"], "ClusterQueue") if item["metadata"]["name"] == "language"]
    (group,) = queue["spec"]["resourceGroups"]
    assert group["coveredResources"] == ["cpu", "memory", "nvidia.com/gpu"]
    assert [flavor["name"] for flavor in group["flavors"]] == ["h200", "cpu"]
    for flavor in group["flavors"]:
        assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    # A limit of nothing is a limit.
    assert group["flavors"][1]["resources"][2]["borrowingLimit"] == 0
    assert "borrowingLimit" not in group["flavors"][0]["resources"][2]


NAMES_IN = {"name", "key", "namespace", "claimName", "serviceAccountName", "nodeLabel", "topologyName"}
NAMES_IN |= {"kubernetes.io/metadata.name"}


def of_names(value):
    """What is under any key that names something."""
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key in NAMES_IN)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from of_names(item)


def test_names_that_look_like_numbers_are_names(helm, tmp_path):
    (tmp_path / "values.yaml").write_text(
        """
        image: {repository: registry.example/strata, tag: "1", pullSecrets: ["12345"]}
        tenants:
          - project: "2024"
            domains: ["1"]
            queues: [{name: "007", clusterQueue: "1e3"}]
            serviceAccount: {name: "11"}
            network: {others: [{namespace: "10"}]}
            podTemplate:
              env: {"NO": "off"}
              envSecrets: ["12"]
              imagePullSecrets: ["12345"]
              volumes: [{name: "1", claim: "2", mountPath: /data}]
        queues:
          topologies: [{name: "14", levels: ["8"]}]
          flavors: [{name: "12", nodeLabels: {a: "1"}, nodeTaints: [{key: "9"}], topology: "14"}]
          clusterQueues:
            - name: "1e3"
              cohort: "0x1"
              quotas: [{flavor: "12", resources: {cpu: {nominal: 8}, memory: {nominal: 8Gi}}}]
          priorities: [{name: "10", value: 1}]
        kernels: {prepull: {enabled: true}}
        tests:
          env: {"ON": "1"}
          reachable: ["[fd00::1]:443"]
          volumes: [{name: "1", claim: "2", mountPath: /data}]
          resources: {cpu: 1, memory: 2Gi}
          job: {resources: {cpu: 1, memory: 2Gi}}
        """
    )
    objects = helm.render("--values", tmp_path / "values.yaml")
    assert [name for name in of_names(objects) if not isinstance(name, str)] == []
    for item in objects:
        assert all(isinstance(text, str) for text in item["metadata"].get("labels", {}).values()), item
    (queue,) = of_kind(objects, "ClusterQueue")
    assert queue["spec"]["cohortName"] == "0x1"
    assert queue["spec"]["resourceGroups"][0]["flavors"][0]["name"] == "12"
    (local,) = of_kind(objects, "LocalQueue")
    assert local["spec"]["clusterQueue"] == "1e3"
    (pod,) = [item for item in of_kind(objects, "Pod") if item["metadata"]["namespace"] == "strata-system"]
    (variable,) = [item for item in pod["spec"]["containers"][0]["env"] if item["name"] == "STRATA_CHECK"]
    assert Cluster.model_validate_json(variable["value"]).job_resources == {"cpu": 1, "memory": "2Gi"}


def test_queues_take_tenants_alone(rendered):
    for queue in of_kind(rendered["teams"], "ClusterQueue"):
        (selector,) = queue["spec"]["namespaceSelector"]["matchExpressions"]
        assert selector["values"] == ["language-development", "language-production", "speech-development"]


def test_queues_without_tenants_take_nothing(helm):
    (queue,) = of_kind(
        helm.render("--values", CHART / "ci" / "rdma-values.yaml", "--set-json", "tenants=[],tests.allReduce.nodes=0"),
        "ClusterQueue",
    )
    # Of a namespace's own label, which Kubernetes gives to each; Kueue refuses values that no label can have.
    assert queue["spec"]["namespaceSelector"] == {
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "DoesNotExist"}]
    }


def test_a_fast_network_is_asked_for_by_a_template_of_its_own(rendered):
    templates = {item["metadata"]["name"]: item for item in of_kind(rendered["rdma"], "PodTemplate")}
    assert set(templates) == {"strata", "strata-rdma", "strata-sriov", "strata-shared"}
    plain, fast = templates["strata"], templates["strata-rdma"]
    assert "resources" not in plain["template"]["spec"]["containers"][0]
    (container,) = fast["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"rdma/ib": 8}, "limits": {"rdma/ib": 8}}
    # Without an operator Kubernetes would compare with an empty value.
    assert fast["template"]["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert fast["template"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "cloud.example/rack"
    }
    attached = templates["strata-sriov"]["template"]
    assert attached["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "sriov/fabric0, sriov/fabric1"
    (container,) = attached["spec"]["containers"]
    assert container["resources"]["limits"] == {
        "nvidia.com/fabric0": 1, "nvidia.com/fabric1": 1, "memory": "1Gi", "hugepages-2Mi": "1Gi",
    }  # fmt: skip
    env = {item["name"]: item.get("value") for item in container["env"]}
    # The variant's, in place of the tenant's.
    assert (env["NCCL_IB_HCA"], env["NCCL_SOCKET_IFNAME"]) == ("=mlx5_0,mlx5_1", "eth0")


def test_a_cohort_may_have_any_name(helm):
    named = {"name": "cycle", "parent": "all"}
    (cohort,) = of_kind(helm.render("--set-json", f"queues.cohorts={json.dumps([named])}"), "Cohort")
    assert cohort["spec"] == {"parentName": "all"}


def test_gpus_of_another_vendor_are_what_is_queued_for_and_asked_for(rendered):
    (policy,) = [
        item for item in of_kind(rendered["amd"], "ValidatingAdmissionPolicy")
        if item["metadata"]["name"].endswith("-pods")
    ]  # fmt: skip
    (devices,) = [each["expression"] for each in policy["spec"]["variables"] if each["name"] == "asksForDevices"]
    assert '"amd.com/"' in devices and '"deviceclass.resource.kubernetes.io/"' in devices
    (quota,) = of_kind(rendered["amd"], "ResourceQuota")
    assert quota["spec"]["hard"]["requests.amd.com/gpu"] == 64
    assert all_reduce_of(rendered["amd"]).gpu_resource == "amd.com/gpu"


def all_reduce_of(objects):
    """What `helm test` measures between nodes."""
    (pod,) = [item for item in of_kind(objects, "Pod") if item["metadata"]["name"] == "strata-test"]
    env = {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"]}
    return Cluster.model_validate_json(env["STRATA_CHECK"]).all_reduce


def test_bandwidth_is_measured_if_asked_through_the_first_queue(rendered):
    assert all_reduce_of(rendered["teams"]) is None
    test = all_reduce_of(rendered["rdma"])
    assert (test.namespace, test.queue, test.pod_template) == ("language-production", "train", "strata-rdma")
    assert (test.nodes, test.gpus, test.gpu_resource, test.min_bandwidth) == (2, 8, "nvidia.com/gpu", 300)
    (rights,) = [
        item["rules"] for item in of_kind(rendered["rdma"], "Role")
        if item["metadata"] | {"labels": 0, "annotations": 0}
        == {"name": "strata-test", "namespace": "language-production", "labels": 0, "annotations": 0}
    ]  # fmt: skip
    assert {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]} in rights


# What an update cannot change, or what every one changes.
UPDATED = {
    "name", "generateName", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
    "selfLink", "generation", "resourceVersion", "managedFields",
}  # fmt: skip


def test_gpu_nodes_are_watched_by_pods_with_nvml_and_few_rights(rendered, helm):
    (daemons,) = of_kind(rendered["rdma"], "DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    assert (pod["runtimeClassName"], pod["restartPolicy"]) == ("nvidia", "Always")
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.device-plugin": "true"}
    # Its own taint, too: who takes it back?
    assert {"key": TAINT, "operator": "Exists"} in pod["tolerations"]
    (container,) = pod["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["NVIDIA_DRIVER_CAPABILITIES"]) == ("all", "utility")
    # It looks at GPUs, and takes none.
    assert not any("gpu" in name for name in container["resources"]["limits"])
    settings = node_health.Settings.model_validate_json(env[node_health.VARIABLE])
    assert settings.taint and settings.seconds == 60
    assert container["ports"] == [{"name": "metrics", "containerPort": settings.port}]
    (role,) = [item for item in of_kind(rendered["rdma"], "ClusterRole") if item["metadata"]["name"].endswith("health")]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]
    here = {item["metadata"]["name"] for item in of_kind(rendered["rdma"], "ValidatingAdmissionPolicyBinding")}
    assert "strata-node-health" in here
    (policy,) = [
        item
        for item in of_kind(rendered["rdma"], "ValidatingAdmissionPolicy")
        if item["metadata"]["name"] == "strata-node-health"
    ]
    held = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    for part, model, free in (
        ("metadata", V1ObjectMeta, UPDATED), ("spec", V1NodeSpec, {"taints"}), ("status", V1NodeStatus, {"conditions"}),
    ):  # fmt: skip
        fields = set(model.attribute_map.values()) - free
        assert {name for name in fields if f"object.{part}.?{name} == oldObject.{part}.?{name} &&" in held} == fields
    assert not of_kind(rendered["single-gpu"], "DaemonSet")
    set_ = "nodeHealth.enabled=true,nodeHealth.runtimeClass=,image.repository=x"
    (bare,) = of_kind(helm.render("--set", set_), "DaemonSet")
    assert "runtimeClassName" not in bare["spec"]["template"]["spec"]


def test_shares_weights_and_conditions_of_an_admission_are_kueues(rendered):
    queues = {item["metadata"]["name"]: item["spec"] for item in of_kind(rendered["autoscaled"], "ClusterQueue")}
    assert queues["language"]["fairSharing"] == {"weight": "2"} and queues["speech"]["fairSharing"] == {"weight": "0.5"}
    assert "fairSharing" not in queues["abroad"]
    assert queues["language"]["admissionChecksStrategy"] == {
        "admissionChecks": [{"name": "make-nodes", "onFlavors": ["preemptible"]}]
    }
    assert queues["abroad"]["admissionChecksStrategy"] == {"admissionChecks": [{"name": "go-west"}]}
    assert queues["language"]["flavorFungibility"]["whenCanBorrow"] == "TryNextFlavor"
    cohorts = {item["metadata"]["name"]: item["spec"] for item in of_kind(rendered["autoscaled"], "Cohort")}
    assert cohorts["research"] == {"parentName": "company", "fairSharing": {"weight": "3"}}
    checks = {item["metadata"]["name"]: item["spec"] for item in of_kind(rendered["autoscaled"], "AdmissionCheck")}
    kinds = {"make-nodes": "ProvisioningRequestConfig", "go-west": "MultiKueueConfig"}
    for name, kind in kinds.items():
        (found,) = of_kind(rendered["autoscaled"], kind)
        assert checks[name]["parameters"] == {"apiGroup": "kueue.x-k8s.io", "kind": kind, "name": name}
        assert found["metadata"]["name"] == name
    (cluster,) = of_kind(rendered["autoscaled"], "MultiKueueCluster")
    source = cluster["spec"]["clusterSource"]["kubeConfig"]
    assert source == {"locationType": "Secret", "location": "west-kubeconfig"}


def test_what_a_tree_of_cohorts_lends_counts_for_the_largest_admission(rendered):
    """Beside 16 GPUs of its queue, a run may borrow the 32 of one that shares no cohort with it but the root."""
    (text,) = [
        item["data"]["shares.json"] for item in of_kind(rendered["autoscaled"], "ConfigMap")
        if item["metadata"] | {"labels": 0} == {"name": "strata-queues", "namespace": "speech-production", "labels": 0}
    ]  # fmt: skip
    shares = Shares.parse(text)
    spec = {"resources": {"gpu": 8, "cpu": "8", "memory": "64Gi"}, "parallel": {"type": "fsdp"}, "output": "/runs"}
    for pods, fits in ((6, True), (7, False)):
        run = RunSpec.model_validate(spec | {"topology": {"nnodes": pods, "nproc_per_node": 8}})
        assert (shares.problem(run.resources, run.topology, is_job=True) is None) is fits


def test_a_toleration_of_a_value_compares_it(helm, tmp_path):
    (tmp_path / "values.yaml").write_text(
        """
        image: {repository: x}
        queues: {required: false}
        tenants:
          - project: p
            domains: [d]
            podTemplate:
              tolerations:
                - {key: dedicated, value: ml, effect: NoSchedule}
                - {key: spot}
                - {key: dedicated, operator: Equal, value: "1"}
        """
    )
    (template,) = of_kind(helm.render("--values", tmp_path / "values.yaml"), "PodTemplate")
    assert template["template"]["spec"]["tolerations"] == [
        {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
        {"key": "dedicated", "operator": "Equal", "value": "1"},
    ]


def test_kernels_are_baked_where_pods_look_for_them(helm, rendered):
    jobs = [job for job in of_kind(rendered["teams"], "Job") if job["metadata"]["name"].startswith("strata-bake")]
    assert len(jobs) == 3
    for job in jobs:
        assert_restricted(job["spec"]["template"]["spec"])
        (container,) = job["spec"]["template"]["spec"]["containers"]
        env = {item["name"]: item["value"] for item in container["env"]}
        assert (env["MODELS"], env["ARCHS"]) == ("qwen3-4b,/models/ours/config.json", "sm_90,sm_100")
        for template in of_kind(rendered["teams"], "PodTemplate"):
            (pod,) = template["template"]["spec"]["containers"]
            assert {"name": "STRATA_BAKED_KERNELS", "value": env["FOLDER"]} in pod["env"]
            (mount,) = [mount for mount in pod["volumeMounts"] if mount["name"] == "baked-kernels"]
            assert env["FOLDER"].startswith(f"{mount['mountPath']}/") and mount["readOnly"] is True
    # A Job's pod cannot be changed: what makes another pod makes another Job.
    other = helm.render("--values", CHART / "ci" / "teams-values.yaml", "--set", "kernels.bake.resources.cpu=4")
    names = {job["metadata"]["name"] for job in jobs}
    assert not names & {job["metadata"]["name"] for job in of_kind(other, "Job")}


def test_kernels_of_the_image_are_used_where_none_are_baked(rendered):
    for template in of_kind(rendered["single-gpu"], "PodTemplate"):
        (pod,) = template["template"]["spec"]["containers"]
        assert all(item["name"] != "STRATA_BAKED_KERNELS" for item in pod["env"])


def test_pods_know_the_store_and_its_key_from_a_secret(rendered):
    for template in of_kind(rendered["rdma"], "PodTemplate"):
        (pod,) = template["template"]["spec"]["containers"]
        env = {item["name"]: item for item in pod["env"]}
        assert env[store.URL]["value"] == "s3://strata/kernels"
        assert env[store.SIGNING_KEY]["valueFrom"] == {
            "secretKeyRef": {"name": "kernel-store", "key": store.SIGNING_KEY, "optional": True}
        }
    for template in of_kind(rendered["teams"], "PodTemplate"):
        (pod,) = template["template"]["spec"]["containers"]
        assert not {store.URL, store.SIGNING_KEY} & {item["name"] for item in pod["env"]}


def test_nodes_that_train_hold_the_image(rendered):
    (held,) = of_kind(rendered["teams"], "DaemonSet")
    pod = held["spec"]["template"]["spec"]
    assert_restricted(pod)
    (job, *_) = of_kind(rendered["teams"], "Job")
    assert pod["containers"][0]["image"] == job["spec"]["template"]["spec"]["containers"][0]["image"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_policies_know_the_queues_of_each_tenant(rendered):
    found = of_kind(rendered["teams"], "ValidatingAdmissionPolicy")
    names = [each["metadata"]["name"] for each in found]
    kinds = ("jobs", "jobsets", "pods", "workloads")
    assert sorted(names) == ["strata-owner", *(f"strata-queue-required-{kind}" for kind in kinds)]
    policies = [found[names.index(f"strata-queue-required-{kind}")] for kind in ("jobs", "pods")]
    for policy in policies:
        # An API server that saw a policy with parameters go never finds those of the next installation.
        assert "paramKind" not in policy["spec"]
        queues = policy["spec"]["variables"][0]
        assert json.loads(queues["expression"].removesuffix("[request.namespace]")) == {
            "language-development": ["default", "spot"],
            "language-production": ["default", "spot"],
            "speech-development": ["default"],
        }
    # Whoever may change a JobSet that waits may not take it out of its queue, and so start it.
    jobs, _ = (policy["spec"] for policy in policies)
    operations = {rule["resources"][0]: rule["operations"] for rule in jobs["matchConstraints"]["resourceRules"]}
    assert operations == {"pytorchjobs": ["CREATE"], "jobsets": ["CREATE", "UPDATE"]}
    queue = "{}.metadata.?labels[?'kueue.x-k8s.io/queue-name'].orValue('')"
    own, before = queue.format("object"), queue.format("oldObject")
    same = f"request.operation == 'UPDATE' && {own} == {before}"
    assert jobs["validations"][0]["expression"] == f"{same} || {own} != '' && {own} in variables.queues"
    # Or start it, or change what its workload asks for: only Kueue may.
    kueue = "authorizer.group('kueue.x-k8s.io').resource('workloads').subresource('status')"
    (workloads,) = [each["spec"] for each in found if each["metadata"]["name"].endswith("-workloads")]
    suspended, ranked = jobs["validations"][1:]
    for rule in (suspended, ranked, *workloads["validations"]):
        assert f"|| {kueue}" in rule["expression"]
    label = "{}.metadata.?labels[?'kueue.x-k8s.io/priority-class'].orValue('')"
    assert f"{label.format('object')} == {label.format('oldObject')} ||" in ranked["expression"]
    assert "active" not in workloads["validations"][0]["expression"]
    # Flyte retries what is Forbidden, and ends a run whose object is Invalid.
    assert [policy["spec"]["validations"][0]["reason"] for policy in policies] == ["Invalid", "Invalid"]
    assert of_kind(rendered["objects-elsewhere"], "ValidatingAdmissionPolicy") == []


def shares_in(objects):
    maps = [item for item in of_kind(objects, "ConfigMap") if item["metadata"]["name"] == "strata-queues"]
    return {item["metadata"]["namespace"]: Shares.parse(item["data"]["shares.json"]) for item in maps}


def test_what_the_queues_can_admit_is_published_to_runs_and_members(rendered):
    shares = shares_in(rendered["teams"])
    assert set(shares["speech-development"].cluster_queues) == {"language", "speech", "idle"}
    # 64 of its own, and 64 of the other team's.
    asked = {"cpu": 1, "memory": "1Gi", "gpu": 8}
    run = {"output": "/runs", "topology": {"nproc_per_node": 8}, "parallel": {"type": "ddp"}, "resources": asked}
    for nodes, fits in ((16, True), (17, False)):
        run["topology"]["nnodes"] = nodes
        spec = RunSpec.model_validate(run)
        assert (shares["speech-development"].problem(spec.resources, spec.topology, is_job=True) is None) == fits
    assert shares["speech-development"].unqueued == {"cpu": "16", "memory": "64Gi"}, "as in the policy of pods"
    small = shares_in(rendered["single-gpu"])["flytesnacks-development"]
    assert small.required and small.queues == {"default": "everything"}
    elsewhere = shares_in(rendered["objects-elsewhere"])["flytesnacks-development"]
    assert not elsewhere.required and elsewhere.cluster_queues == {}
    # Devices of the variants, beside the run's own resources.
    fast = shares_in(rendered["rdma"])["language-production"]
    run |= {"topology": {"nproc_per_node": 8}, "resources": asked | {"queue": "train", "pod_template": "strata-rdma"}}
    for nodes, fits in ((128, True), (129, False)):
        run["topology"]["nnodes"] = nodes
        spec = RunSpec.model_validate(run)
        found = fast.problem(spec.resources, spec.topology, is_job=True)
        assert found is None if fits else "ask for 1032 rdma/ib and at most 1024 rdma/ib can be had" in found
    (role, *_) = [item for item in of_kind(rendered["teams"], "Role") if item["metadata"]["name"] == "strata-member"]
    assert ["strata-prices", "strata-queues"] in [rule.get("resourceNames") for rule in role["rules"]]
    template = of_kind(rendered["single-gpu"], "PodTemplate")[0]["template"]
    (given,) = [item for item in template["spec"]["containers"][0]["env"] if item["name"] == "STRATA_QUEUES"]
    assert given["valueFrom"]["configMapKeyRef"] == {"name": "strata-queues", "key": "shares.json", "optional": True}


def test_pods_know_their_names(rendered):
    for item in of_kind(rendered["teams"], "PodTemplate"):
        (pod,) = [each for each in item["template"]["spec"]["containers"][0]["env"] if each["name"] == "STRATA_POD"]
        assert pod["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_tests_have_rights_only_while_they_run(rendered):
    for item in rendered["teams"]:
        if item["metadata"]["name"].startswith("strata-test"):
            assert item["metadata"]["annotations"]["helm.sh/hook"] == "test"
    for role in of_kind(rendered["teams"], "Role"):
        allowed = {"get", "list", "watch", "create", "delete"} | (
            {"patch"} if role["metadata"]["name"] in ("strata-removal", "strata-submitter") else set()
        )
        if role["metadata"]["name"] != "strata-flyte":
            assert all(set(rule["verbs"]) <= allowed for rule in role["rules"])
        assert all("secrets" not in rule["resources"] for rule in role["rules"])


@pytest.mark.parametrize("name", NAMES)
def test_flyte_may_start_runs_in_every_namespace_of_a_tenant(rendered, name):
    own = [item for item in rendered[name] if item["metadata"]["name"] == "strata-flyte"]
    places = {kind: sorted(i["metadata"]["namespace"] for i in of_kind(own, kind)) for kind in ("Role", "RoleBinding")}
    assert (
        places["Role"]
        == places["RoleBinding"]
        == sorted(item["metadata"]["namespace"] for item in of_kind(rendered[name], "LimitRange"))
    )
    for binding in of_kind(own, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "flyte-binary", "namespace": "flyte"}]
    for role in of_kind(own, "Role"):
        given = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
        # Above all no Secrets, and nothing like pods/exec.
        assert set(given) == {"flyteworkflows", "pods", "pytorchjobs", "events"}
        assert {"create", "delete"} <= given["pods"] & given["pytorchjobs"] & given["flyteworkflows"]
        assert all("*" not in verbs and "list" not in verbs for verbs in given.values())


def test_flyte_has_no_rights_where_none_are_asked_for(helm):
    objects = helm.render("--values", PRESETS[-1], "--set", "flyte.rights=false")
    assert not [item for item in objects if item["metadata"]["name"] == "strata-flyte"]


def test_what_is_removed_first_is_what_is_installed(helm, rendered):
    for name, objects in rendered.items():
        jobs = [job for job in of_kind(objects, "Job") if job["metadata"]["name"] == "strata-removal"]
        assert len(jobs) == (0 if name == "objects-elsewhere" else 1)
        for job in jobs:
            pod = job["spec"]["template"]["spec"]
            assert_restricted(pod)
            (given,) = [item for item in pod["containers"][0]["env"] if item["name"] == removal.VARIABLE]
            release = removal.Release.model_validate_json(given["value"])
            for kind, names in (
                ("ClusterQueue", release.cluster_queues),
                ("ResourceFlavor", release.flavors),
                ("Topology", release.topologies),
            ):
                assert names == [item["metadata"]["name"] for item in of_kind(objects, kind)]
            for kind, names in (("Cohort", release.cohorts), ("AdmissionCheck", release.admission_checks)):
                assert sorted(names) == sorted(item["metadata"]["name"] for item in of_kind(objects, kind))
            local = [(i["metadata"]["namespace"], i["metadata"]["name"]) for i in of_kind(objects, "LocalQueue")]
            assert release.local_queues == local
    hooks = [item["metadata"] for item in rendered["teams"] if item["metadata"]["name"] == "strata-removal"]
    # Six of the release, and a right in each namespace of a tenant.
    assert len(hooks) == 6 + 2 * len(of_kind(rendered["teams"], "Namespace"))
    assert {item["annotations"]["helm.sh/hook"] for item in hooks} == {"pre-delete"}
    off = helm.render("--values", CHART / "ci" / "teams-values.yaml", "--set", "removal.enabled=false")
    assert not [item for item in off if item["metadata"]["name"] == "strata-removal"]


def test_runs_without_prospect_are_ended_where_that_is_asked_for(helm, rendered):
    assert of_kind(rendered["teams"], "CronJob") == []
    asked = ("--set", "queues.timeout.after=2h", "--set", "queues.timeout.flyte=flyte-binary-grpc.flyte:8089")
    objects = helm.render("--values", CHART / "ci" / "teams-values.yaml", *asked)
    (job,) = of_kind(objects, "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert_restricted(pod)
    env = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
    settings = queue_timeout.Settings.model_validate_json(env[queue_timeout.VARIABLE])
    assert settings.longest == timedelta(hours=2) and len(settings.tenants) == 3
    assert (settings.tenants[0].project, settings.tenants[0].domain) == ("language", "development")
    roles = [item for item in of_kind(objects, "Role") if item["metadata"]["name"] == job["metadata"]["name"]]
    assert {role["metadata"]["namespace"] for role in roles} == {tenant.namespace for tenant in settings.tenants}
    for role, tenant in zip(roles, settings.tenants, strict=True):
        verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
        assert verbs == ({"get", "list", "patch"} if tenant.job_sets else {"list"})
    assert {tenant.job_sets for tenant in settings.tenants} == {True, False}


def test_runs_without_prospect_are_ended_without_a_flyte(helm):
    objects = helm.render("--values", CHART / "ci" / "teams-values.yaml", "--set", "queues.timeout.after=2h")
    (job,) = of_kind(objects, "CronJob")
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert not queue_timeout.Settings.model_validate_json(env[queue_timeout.VARIABLE]).flyte
    assert not any("FLYTE" in name for name in env)


def test_the_program_that_ends_runs_logs_in_with_a_secret(helm, tmp_path, monkeypatch):
    asked = "queues.timeout.after=2h,queues.timeout.flyte=flyte:8089,queues.timeout.secret=of-flyte"
    (job,) = of_kind(helm.render("--values", CHART / "ci" / "teams-values.yaml", "--set", asked), "CronJob")
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    content = {"client_id": "strata", "client_secret": "its-secret"}
    for item in container["env"]:
        value = item.get("value")
        if value is None:
            assert item["valueFrom"]["secretKeyRef"]["name"] == "of-flyte"
            value = content[item["valueFrom"]["secretKeyRef"]["key"]]
        monkeypatch.setenv(item["name"], value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    # What Flyte's own client makes of these variables.
    platform = PlatformConfig.auto()
    assert (platform.client_id, platform.client_credentials_secret) == ("strata", "its-secret")
    assert platform.auth_mode.upper() == AuthType.CLIENT_CREDENTIALS.name


def test_what_is_old_is_removed_with_the_least_rights(helm):
    asked = ("--set", "retention.objects=7d,retention.checkpoints=30d,retention.folders={/runs}")
    values = ("--values", CHART / "ci" / "teams-values.yaml", *asked)
    for dry, verbs in (("true", {"list"}), ("false", {"list", "delete"})):
        objects = helm.render(*values, "--set", f"retention.dryRun={dry}")
        jobs = {(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in of_kind(objects, "CronJob")}
        tenants = {item["metadata"]["name"] for item in of_kind(objects, "Namespace")}
        assert set(jobs) == {("strata-system", "strata-retention-objects")} | {
            (tenant, "strata-retention-folders") for tenant in tenants
        }
        for (namespace, _), job in jobs.items():
            pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            assert_restricted(pod)
            (container,) = pod["containers"]
            given = {item["name"]: item.get("value") for item in container["env"]}[retention.VARIABLE]
            settings = retention.Settings.model_validate_json(given)
            assert settings.dry_run == (dry == "true")
            if namespace in tenants:
                # Its claims, and no token.
                assert not pod["automountServiceAccountToken"] and container["volumeMounts"]
                assert (settings.checkpoints, settings.runs, settings.folders) == ("30d", "", ["/runs"])
            else:
                assert set(settings.namespaces) == tenants and settings.objects == "7d"
        roles = [item for item in of_kind(objects, "Role") if item["metadata"]["name"] == "strata-retention-objects"]
        assert {role["metadata"]["namespace"] for role in roles} == tenants
        assert {verb for role in roles for rule in role["rules"] for verb in rule["verbs"]} == verbs


def test_what_is_tested_is_what_is_installed(rendered):
    (pod,) = [item for item in of_kind(rendered["teams"], "Pod") if item["metadata"]["namespace"] == "strata-system"]
    (variable,) = [item for item in pod["spec"]["containers"][0]["env"] if item["name"] == "STRATA_CHECK"]
    for tenant in json.loads(variable["value"])["tenants"]:
        for kind, names in tenant["objects"].items():
            own = [i["metadata"] for i in of_kind(rendered["teams"], kind)]
            assert set(names) <= {i["name"] for i in own if i["namespace"] == tenant["namespace"]}
    assert pod["spec"]["containers"][0]["image"].startswith("registry.example/strata@sha256:")


def test_the_projects_that_flyte_has_to_know_are_named(helm):
    said = helm.notes(CHART, "--values", CHART / "ci" / "teams-values.yaml")
    assert re.findall(r"flytectl create project --id (\S+) --name (\S+)", said) == [("language",) * 2, ("speech",) * 2]


def test_names_of_another_release_do_not_clash(helm):
    other = helm("template", "other", CHART, "--values", PRESETS[-1])
    assert "other-queue-required-jobs" in other.stdout and "name: strata-queue-required" not in other.stdout


def relabeled(labels, rules):
    """The labels of a target, as Prometheus relabels it; None if it is none."""
    labels = dict(labels)
    for rule in rules:
        match = re.fullmatch(
            rule.get("regex", "(.*)"), ";".join(labels.get(x, "") for x in rule.get("sourceLabels", []))
        )
        action = rule.get("action", "replace")
        if action == "keep" and not match:
            return None
        if action == "labeldrop":
            labels = {name: value for name, value in labels.items() if not re.fullmatch(rule["regex"], name)}
        if action == "replace" and match:
            labels[rule["targetLabel"]] = rule.get("replacement", "$1").replace("$1", match[1])
    return {name: value for name, value in labels.items() if not name.startswith("__meta_")}


# A label of a pod with so many processes, by the monitor that reads it. Flyte writes a task's name into labels in lower
# case, with dashes in place of what a name may not have.
LABELS = {
    "strata-runs": ("task_name", lambda shape: re.sub("[^a-z0-9-]", "-", f"tasks.topology.train_{shape}")),
    "strata-jobsets": (SHAPE.replace("/", "_"), str),
}


def addresses(monitor, address, **more):
    """Where Prometheus reads the metrics of a pod."""
    meta = {f"__meta_kubernetes_pod_{name}": value for name, value in more.items()}
    pod = {"__meta_kubernetes_pod_ip": address, "__meta_kubernetes_pod_phase": "Running"} | meta
    found = [relabeled(pod, endpoint["relabelings"]) for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    return [target["__address__"] for target in found if target]


def test_metrics_of_training_pods_alone_are_read_and_let_in(rendered):
    monitors = {item["metadata"]["name"]: item for item in of_kind(rendered["rdma"], "PodMonitor")}
    (port,) = monitors.pop("strata-node-health")["spec"]["podMetricsEndpoints"]
    assert port["port"] == "metrics"
    assert set(monitors) == {"strata-runs", "strata-jobsets"}
    for name, monitor in monitors.items():
        assert monitor["metadata"]["labels"]["release"] == "monitoring"
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["language-production"]}
        label, of = LABELS[name]
        for address, host in (("10.1.2.3", "10.1.2.3"), ("fd00::1", "[fd00::1]")):
            # A port for each process that there is, and none that would be down.
            for processes in (1, 2, 8, 16):
                found = addresses(monitor, address, **{f"label_{label}": of(f"16x{processes}")})
                assert found == [f"{host}:{9400 + i}" for i in range(min(processes, 8))]
            assert not addresses(monitor, address, **{f"label_{label}": of("16x8"), "phase": "Succeeded"})
            assert not addresses(monitor, address, **{f"label_{label}": "tasks-finish-finish"})
    # The labels that pods of a JobSet have, as Prometheus writes them.
    (selected,) = monitors["strata-jobsets"]["spec"]["selector"]["matchExpressions"]
    assert selected == {"key": SHAPE, "operator": "Exists"}
    source = "__meta_kubernetes_pod_label_" + JOB_SET.label.replace("/", "_")
    pod = {"__meta_kubernetes_pod_label_strata_shape": "2x1", "__meta_kubernetes_pod_phase": "Running", source: "mine"}
    first = monitors["strata-jobsets"]["spec"]["podMetricsEndpoints"][0]["relabelings"]
    # The containers of a pod, which are targets each, become the same one.
    same = [relabeled(pod | {"container": container}, first) for container in ("init", "default")]
    assert same == [{"execution_id": "mine"}] * 2
    policies = of_kind(rendered["rdma"], "NetworkPolicy")
    (default,) = [item["spec"] for item in policies if item["metadata"]["name"] == "strata-default"]
    (rule,) = default["ingress"]
    assert rule["ports"] == [{"port": 9400, "endPort": 9407, "protocol": "TCP"}]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def test_alerts_have_the_values_and_say_what_to_look_at(rendered):
    (rules,) = of_kind(rendered["rdma"], "PrometheusRule")
    (group,) = rules["spec"]["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    source = (CHART / "templates" / "observability" / "rules.yaml").read_text()
    assert sorted(alerts) == sorted(re.findall(r"- alert: (\w+)", source))
    for rule in alerts.values():
        read(rule["expr"])
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["labels"]["team"] == "platform"
        assert rule["annotations"]["summary"] and "\n" not in rule["annotations"]["description"]
    assert "[10m]" in alerts["StrataRunStalled"]["expr"] and "{{ $labels.run }}" in str(alerts["StrataRunStalled"])
    assert alerts["StrataRunSlow"]["expr"].endswith(" < 0.7")
    assert alerts["StrataQueueWaiting"]["for"] == "1h"


def test_dashboards_are_the_files(rendered):
    maps = [item for item in of_kind(rendered["rdma"], "ConfigMap") if "dashboard" in item["metadata"]["name"]]
    files = {path.name: path.read_text() for path in CHART.glob("dashboards/*.json")}
    assert {name: text for item in maps for name, text in item["data"].items()} == files
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)


def test_nothing_is_watched_unless_asked(rendered):
    assert not {item["kind"] for item in rendered["teams"]} & {"PodMonitor", "PrometheusRule"}
