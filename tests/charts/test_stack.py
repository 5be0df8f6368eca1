"""The umbrella's versions and values: each fits the others. Of its dependencies only Strata is here to be rendered."""

import json
import re
import shutil

import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from strata_platform.chart.values import ChartValues
from strata_platform.flyte_rights import WATCHED, WRITTEN
from strata_platform.kubernetes_answers import TASK_LIMITS
from strata_platform.spec.run_spec import Resources
from tasks.resources import CONTROL_TASK, PREPARE_TASK, overrides
from tests.charts.conftest import CHART, HELM, ROOT, Helm
from tests.e2e.helpers.local_cluster import leave_out_absent

STACK = ROOT / "charts" / "strata-stack"
META = yaml.safe_load((STACK / "Chart.yaml").read_text())
VALUES = yaml.safe_load((STACK / "values.yaml").read_text())
DEPENDENCIES = {item["name"]: item for item in META["dependencies"]}
FLYTE, KUEUE, MONITORING = VALUES["flyte-binary"], VALUES["kueue"], VALUES["monitoring"]
PROMETHEUS, GRAFANA = MONITORING["prometheus"]["prometheusSpec"], MONITORING["grafana"]


@pytest.fixture(scope="module")
def strata():
    return ChartValues.model_validate_json(json.dumps(VALUES["strata"]))


def test_versions_are_exact_and_images_are_of_them():
    assert all(re.fullmatch(r"v?\d+\.\d+\.\d+", item["version"]) for item in DEPENDENCIES.values())
    assert FLYTE["deployment"]["image"]["tag"] == DEPENDENCIES["flyte-binary"]["version"]
    assert KUEUE["controllerManager"]["manager"]["image"]["tag"] == f"v{DEPENDENCIES['kueue']['version']}"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert DEPENDENCIES["strata"]["version"] == chart["version"]
    assert META["kubeVersion"] == chart["kubeVersion"]


def test_every_dependency_has_a_switch_that_its_own_values_do_not_see():
    # The chart's schema would refuse a key of the umbrella's.
    switches = {item["condition"] for item in DEPENDENCIES.values()}
    assert switches == {f"components.{name}" for name in VALUES["components"]}
    assert {item.get("alias", item["name"]) for item in DEPENDENCIES.values()} | {"components"} == set(VALUES)


def test_flyte_starts_pods_from_the_template(strata):
    k8s = FLYTE["configuration"]["inline"]["plugins"]["k8s"]
    assert k8s["default-pod-template-name"] == strata.tenant_defaults.pod_template.name
    assert "pytorch" in FLYTE["enabled_plugins"]["tasks"]["task-plugins"]["enabled-plugins"]


LARGE = overrides(Resources(cpu="224", memory="2Ti", gpu=64))


def lets(limit, asked):
    """Whether flyteadmin registers and propeller starts a task of that as it is; a limit of zero is none to both."""
    return not parse_quantity(limit) or parse_quantity(asked) <= parse_quantity(limit)


def test_flyte_refuses_and_lowers_nothing_that_tasks_ask_for():
    limits = FLYTE["configuration"]["inline"]["task_resources"]["limits"]
    # As flyteadmin's own are 2, 1Gi and 1, one that is not said is one.
    assert set(limits) == {"cpu", "memory", "gpu"}
    for asked in (CONTROL_TASK, PREPARE_TASK, LARGE):
        for pod in (asked["requests"], asked["limits"]):
            for name, quantity in (("cpu", pod.cpu), ("memory", pod.mem), ("gpu", pod.gpu)):
                assert quantity is None or lets(limits[name], quantity), (name, quantity)


def test_the_documents_have_the_limits_of_the_stack():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)
    (documented,) = [found for text in blocks if "enabled_plugins" in (found := yaml.safe_load(text))]
    name = "task_resources"
    assert documented["configuration"]["inline"][name] == FLYTE["configuration"]["inline"][name]


def test_what_is_said_of_the_tasks_is_the_most_that_they_ask_for():
    asked = [task["limits"] for task in (CONTROL_TASK, PREPARE_TASK)]
    most = {
        name: max((getattr(pod, own) for pod in asked), key=parse_quantity)
        for name, own in (("cpu", "cpu"), ("memory", "mem"))
    }
    assert most == TASK_LIMITS


def test_flyte_gives_no_run_up_because_a_server_is_away():
    propeller = FLYTE["configuration"]["inline"]["propeller"]
    # As shipped, 10 rounds without a pause, a run was failed by a minute without the object store (tests/e2e).
    assert propeller["max-workflow-retries"] >= 1000
    assert propeller["queue"]["queue"]["base-delay"] == "1s"


def test_kueue_queues_training_jobs_and_pods_of_tenants(strata):
    config = yaml.safe_load(KUEUE["managerConfig"]["controllerManagerConfigYaml"])
    assert config["integrations"]["frameworks"] == ["kubeflow.org/pytorchjob", "jobset.x-k8s.io/jobset", "pod"]
    (selector,) = config["managedJobsNamespaceSelector"]["matchExpressions"]
    helpers = (CHART / "templates" / "tenants" / "_helpers.tpl").read_text()
    assert f"\n{selector['key']}: " in helpers
    assert strata.queues.kueue.config_map == f"{KUEUE['fullnameOverride']}-manager-config"


def test_pods_of_tenants_do_not_reach_flyte(strata):
    # Its authentication is off as shipped: a tenant's pods could stop the runs of the others.
    assert "auth" not in FLYTE["configuration"]
    assert strata.tenant_defaults.network.flyte == ChartValues().tenant_defaults.network.flyte == ()


def test_the_namespace_is_the_one_of_the_commands(strata):
    places = {strata.queues.kueue.namespace, strata.flyte.namespace}
    places |= {strata.observability.namespace, KUEUE["metrics"]["prometheusNamespace"]}
    readme = (STACK / "README.md").read_text()
    assert places == set(re.findall(r"--namespace (\S+)", readme)) == {"strata-system"}


def assemble(folder, **on):
    """The umbrella with Strata's chart inside of it, and with these components on."""
    shutil.copytree(STACK, folder, ignore=shutil.ignore_patterns("*.tgz"))
    shutil.copytree(CHART, folder / "charts" / "strata")
    components = dict.fromkeys(VALUES["components"], False) | on
    (folder / "values.yaml").write_text(yaml.safe_dump(VALUES | {"components": components}))
    leave_out_absent(folder)
    return folder


@pytest.mark.skipif(HELM is None, reason="no helm on the PATH or in HELM")
def test_projects_that_flyte_does_not_make_are_named(tmp_path):
    tenants = [{"project": project, "domains": ["development"]} for project in ("language", "speech", "flytesnacks")]
    # In both places that Flyte reads.
    admin = {"seedProjects": ["speech"], "seedProjectsWithDetails": [{"name": "flytesnacks", "description": ""}]}
    mine = {
        "strata": {"image": {"repository": "x"}, "queues": {"required": False}, "tenants": tenants},
        "flyte-binary": {"flyte-core-components": {"admin": admin}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    stack = assemble(tmp_path / "stack", strata=True)
    said = Helm(HELM).notes(stack, "--values", tmp_path / "mine.yaml", "--set", "components.flyte=true")
    assert re.findall(r"flytectl create project --id (\S+)", said) == ["language"]
    elsewhere = Helm(HELM).notes(stack, "--values", tmp_path / "mine.yaml")
    assert "flytectl" not in elsewhere


MINE = {
    "image": {"repository": "x"},
    "queues": {"required": False, "kueue": {"check": False}},
    "tenants": [{"project": "flytesnacks", "domains": ["development", "production"]}],
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """The umbrella with Strata, for values of one's own; Flyte's component may be set to on."""
    if HELM is None:
        pytest.skip("there is no helm on the PATH; put it there, or its path into HELM")
    folder = tmp_path_factory.mktemp("rights")
    (folder / "mine.yaml").write_text(yaml.safe_dump({"strata": MINE}))
    return assemble(folder / "stack", strata=True)


def with_flyte(stack, *settings, namespace="strata-system"):
    """What Helm makes of the umbrella with Flyte, whose own chart is not here."""
    values = ["--values", stack.parent / "mine.yaml", "--set", ",".join(("components.flyte=true", *settings))]
    return Helm(HELM)("template", "strata", stack, "--namespace", namespace, *values)


def rules_of_flyte(stack, *settings):
    """The rules that bind Flyte's account: those of the whole cluster, and those of each namespace."""
    done = with_flyte(stack, *settings)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    named = {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): item for item in objects}
    account = {"kind": "ServiceAccount", "name": "flyte-binary", "namespace": "strata-system"}
    rules = {}
    for (kind, place, _), item in named.items():
        if kind.endswith("Binding") and "subjects" in item and account in item["subjects"]:
            role = named[item["roleRef"]["kind"], place, item["roleRef"]["name"]]
            rules.setdefault(place, []).extend(role["rules"])
    return rules


def test_flyte_writes_in_the_namespaces_of_tenants_alone(stack):
    rules = rules_of_flyte(stack)
    tenants = {"flytesnacks-development", "flytesnacks-production"}
    assert set(rules) == {None, "strata-system"} | tenants
    for place, given in rules.items():
        for rule in given:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            assert not any("/" in resource for resource in rule["resources"]), "no pods/exec, no status of others"
            if "secrets" in rule["resources"]:
                assert place == "strata-system"
                # Kubernetes cannot limit `create` to a name.
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["flyte-binary-webhook-secret"]
            if place is None and not {"list", "watch"} >= set(rule["verbs"]):
                assert rule["resources"] in (["customresourcedefinitions"], ["mutatingwebhookconfigurations"])
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["flyte-binary-webhook"]
    (watched,) = [{resource for rule in rules[None] for resource in rule["resources"] if "watch" in rule["verbs"]}]
    assert watched == {"flyteworkflows", "pods", "podtemplates", "pytorchjobs"}


def test_the_doctor_and_helm_test_ask_for_rights_that_the_charts_give(stack):
    held = {
        place: {
            (group, name, verb)
            for r in rules
            for group in r["apiGroups"]
            for name in r["resources"]
            for verb in r["verbs"]
        }
        for place, rules in rules_of_flyte(stack).items()
    }
    assert {(group, name, verb) for group, name in WATCHED for verb in ("list", "watch")} <= held[None]
    assert {(group, name, verb) for group, name, verbs in WRITTEN for verb in verbs} <= held["flytesnacks-development"]


def test_flyte_has_the_rights_that_its_settings_need_and_no_others(stack):
    def named(*settings):
        rules = [rule for given in rules_of_flyte(stack, *settings).values() for rule in given]
        return {name for rule in rules for name in rule.get("resourceNames", [])}, rules

    keys, _ = named("flyte-binary.configuration.auth.enabled=true")
    assert keys == {"flyte-binary-webhook", "flyte-binary-webhook-secret", "flyte-binary-admin-auth"}
    none, rules = named("flyte-binary.flyte-core-components.propeller.disableWebhook=true")
    assert none == set() and not any({"secrets", "mutatingwebhookconfigurations"} & set(r["resources"]) for r in rules)
    _, rules = named("flyte-binary.configuration.propeller.createCRDs=false")
    assert not any("customresourcedefinitions" in rule["resources"] for rule in rules)
    more = "flyte-binary.rbac.extraRules[0]"
    _, rules = named(f"{more}.apiGroups={{ray.io}}", f"{more}.resources={{rayjobs}}", f"{more}.verbs={{list,watch}}")
    assert {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["list", "watch"]} in rules
    assert set(rules_of_flyte(stack, "flyte-binary.rbac.create=true")) == {
        "flytesnacks-development",
        "flytesnacks-production",
    }


def test_rights_that_would_go_to_nobody_or_not_suffice_are_refused(stack):
    for settings, namespace, said in (
        (["strata.flyte.serviceAccount=other"], "strata-system", "set strata.flyte.namespace and strata.flyte.service"),
        ([], "elsewhere", "but Flyte has flyte-binary of elsewhere"),
        (
            ["flyte-binary.flyte-core-components.admin.disableClusterResourceManager=false"],
            "strata-system",
            "leave it true, or set flyte-binary.rbac.create to true",
        ),
    ):
        done = with_flyte(stack, *settings, namespace=namespace)
        assert done.returncode and said in done.stderr, done.stderr


def test_what_is_off_and_not_there_is_left_out(tmp_path):
    meta = yaml.safe_load((assemble(tmp_path / "stack", strata=True, monitoring=True) / "Chart.yaml").read_text())
    assert [item["name"] for item in meta.pop("dependencies")] == ["strata", "kube-prometheus-stack"]
    assert meta == {name: value for name, value in META.items() if name != "dependencies"}


def test_monitoring_is_off_and_has_no_password():
    assert VALUES["components"] == {"flyte": True, "kueue": True, "strata": True, "monitoring": False}
    assert "password" not in json.dumps(MONITORING).lower()


def test_grafana_reads_config_maps_of_its_namespace_and_no_secrets():
    (role,) = GRAFANA["extraObjects"]
    assert role["kind"] == "Role" and role["metadata"]["name"] == GRAFANA["rbac"]["useExistingRole"]
    assert GRAFANA["rbac"]["namespaced"]
    assert [rule["resources"] for rule in role["rules"]] == [["configmaps"]]
    # The sidecars ask for what the role has: for anything else they would be refused.
    assert all(GRAFANA["sidecar"][name]["resource"] == "configmap" for name in ("dashboards", "datasources"))
    assert GRAFANA["sidecar"]["dashboards"]["searchNamespace"] == ""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What Strata makes for the monitoring of the umbrella, by kind."""
    if HELM is None:
        pytest.skip("there is no helm on the PATH; put it there, or its path into HELM")
    folder = tmp_path_factory.mktemp("watched")
    teams = yaml.safe_load((CHART / "ci" / "teams-values.yaml").read_text())
    (folder / "my-values.yaml").write_text(yaml.safe_dump({"strata": teams}))
    stack = assemble(folder / "stack", strata=True)
    values = ["--values", STACK / "monitoring-values.yaml", "--values", folder / "my-values.yaml"]
    # The chart of Prometheus is not here; what reports to it is all the same.
    values += ["--set", "components.monitoring=false"]
    done = Helm(HELM)("template", "strata", stack, "--namespace", "strata-system", *values)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    return {kind: [item for item in objects if item["kind"] == kind] for kind in {item["kind"] for item in objects}}


def test_prometheus_selects_what_strata_makes(watched):
    for kind in ("podMonitor", "serviceMonitor", "rule"):
        assert PROMETHEUS[f"{kind}SelectorNilUsesHelmValues"] is False, "or it asks for a label"
        assert f"{kind}Selector" not in PROMETHEUS
        (outside,) = PROMETHEUS[f"{kind}NamespaceSelector"]["matchExpressions"]
        assert outside["operator"] == "DoesNotExist"
        assert all(outside["key"] in item["metadata"]["labels"] for item in watched["Namespace"])
    tenants = {item["metadata"]["name"] for item in watched["Namespace"]}
    monitors, (rule,) = watched["PodMonitor"], watched["PrometheusRule"]
    assert {item["metadata"]["namespace"] for item in (*monitors, rule)} == {"strata-system"}
    assert all(set(monitor["spec"]["namespaceSelector"]["matchNames"]) == tenants for monitor in monitors)
    assert "strata-system" not in tenants


def test_prometheus_is_let_in_to_the_tenants(watched):
    policies = [item["spec"] for item in watched["NetworkPolicy"] if item["metadata"]["name"] == "strata-default"]
    sources = [source for spec in policies for rule in spec["ingress"] for source in rule["from"]]
    assert len(policies) == len(watched["Namespace"])
    name = {"kubernetes.io/metadata.name": "strata-system"}
    assert sources == [{"namespaceSelector": {"matchLabels": name}}] * len(policies)


def test_grafana_finds_the_dashboards(watched):
    sidecar = GRAFANA["sidecar"]["dashboards"]
    found = {
        item["metadata"]["name"]: item["metadata"]["namespace"]
        for item in watched["ConfigMap"]
        if item["metadata"]["labels"].get(sidecar["label"]) == sidecar["labelValue"]
    }
    assert found == dict.fromkeys(("strata-dashboard-queues", "strata-dashboard-runs"), "strata-system")
