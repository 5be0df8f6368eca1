"""A run as a JobSet: its pods are the tenant's, with what Flyte gives to its own."""

import re

import pytest

from strata_platform.backends.job_set import job_set, object_name
from strata_platform.outcomes import outcome_of_exit
from strata_platform.pod_settings import ENVIRONMENT
from strata_platform.spec import RunSpec, load_spec

TEMPLATE = {
    "metadata": {"labels": {"strata/tenant": "p-d"}, "annotations": {"net": "rdma"}, "creationTimestamp": None},
    "spec": {
        "serviceAccountName": "strata",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "containers": [
            {
                "name": "default",
                "image": "set-by-flyte",
                "imagePullPolicy": "IfNotPresent",
                "securityContext": {"allowPrivilegeEscalation": False},
                "env": [{"name": "HF_HOME", "value": "/cache"}, {"name": "STRATA_PROGRESS", "value": "0"}],
                "envFrom": [{"secretRef": {"name": "hub"}}],
                "resources": {"requests": {"rdma/ib": "1"}, "limits": {"rdma/ib": "1"}},
                "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
            }
        ],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
    },
}
SPEC = RunSpec.model_validate(
    {
        "name": "bot",
        "output": "/runs",
        "topology": {"nnodes": 2, "nproc_per_node": 8},
        "parallel": {"type": "fsdp"},
        "resources": {
            "gpu": 8, "gpu_type": "NVIDIA-H100", "cpu": 96, "memory": "900Gi", "shared_memory": "64Gi",
            "queue": "default", "priority": "urgent", "time_limit": 100,
        },
    }
)  # fmt: skip


def made(spec=SPEC, template=TEMPLATE):
    return job_set("bot", spec, template, "registry/strata:1", "ada", "s")


def pod_of(job):
    return job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


@pytest.mark.parametrize(
    ("resource", "label", "taints"),
    [
        (None, "nvidia.com/gpu.product", ["nvidia.com/gpu"]),
        ("nvidia.com/mig-3g.40gb", "nvidia.com/gpu.product", ["nvidia.com/gpu", "nvidia.com/mig-3g.40gb"]),
        ("amd.com/gpu", "amd.com/gpu.product-name", ["amd.com/gpu"]),
    ],
)
def test_gpus_are_counted_by_the_resource_that_the_spec_names(resource, label, taints):
    asked = {"gpu": 1, "gpu_resource": resource, "gpu_type": "model"}
    pod = pod_of(made(RunSpec.model_validate({"output": "/runs", "resources": asked})))["spec"]
    for kind in ("requests", "limits"):
        found = {name for name in pod["containers"][0]["resources"][kind] if "gpu" in name or "mig" in name}
        assert found == {resource or "nvidia.com/gpu"}
    assert pod["nodeSelector"] == {"pool": "training", label: "model"}
    assert [each["key"] for each in pod["tolerations"]] == ["team", *taints]


def test_the_jobset_queues_and_belongs_to_its_run():
    job = made()
    assert job["metadata"]["labels"] == {
        "strata/execution": "bot", "strata/run": "bot", "strata/owner": "ada",
        "kueue.x-k8s.io/queue-name": "default", "kueue.x-k8s.io/priority-class": "urgent",
        "kueue.x-k8s.io/max-exec-time-seconds": "3700",
    }  # fmt: skip
    # The pods were admitted with it.
    assert not any(label.startswith("kueue") for label in pod_of(job)["metadata"]["labels"])


def test_all_pods_are_one_job_that_starts_again_as_a_whole_and_only_where_that_may_help():
    job = made()
    (workers,) = job["spec"]["replicatedJobs"]
    inner = workers["template"]["spec"]
    assert (inner["parallelism"], inner["completions"], inner["completionMode"]) == (2, 2, "Indexed")
    assert inner["backoffLimit"] == 0 and job["spec"]["failurePolicy"]["maxRestarts"] == 5
    (rule,) = inner["podFailurePolicy"]["rules"]
    given = rule["onExitCodes"]
    assert (rule["action"], given["operator"], given["containerName"]) == ("FailJob", "NotIn", "main")
    for code in range(1, 256):
        assert (code in given["values"]) == outcome_of_exit(code).retryable
    (final,) = job["spec"]["failurePolicy"]["rules"]
    assert (final["action"], final["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_pods_start_from_the_template_of_the_tenant():
    spec = pod_of(made())["spec"]
    (container,) = spec["containers"]
    given = TEMPLATE["spec"]["containers"][0]
    for kept in ("envFrom", "securityContext", "imagePullPolicy"):
        assert container[kept] == given[kept]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("strata", False)
    assert pod_of(made())["metadata"]["annotations"] == {"net": "rdma"}
    assert container["image"] == "registry/strata:1" and "command" not in container
    assert spec["nodeSelector"] == {"pool": "training", "nvidia.com/gpu.product": "NVIDIA-H100"}
    assert [each["key"] for each in spec["tolerations"]] == ["team", "nvidia.com/gpu"]
    assert spec["restartPolicy"] == "Never" and spec["terminationGracePeriodSeconds"] == 120
    assert TEMPLATE["spec"]["containers"][0]["name"] == "default", "the template is as it was"


def test_pods_have_the_resources_of_the_spec_beside_those_of_the_template():
    spec = pod_of(made())["spec"]
    (container,) = spec["containers"]
    asked = {"cpu": "96", "memory": "900Gi", "nvidia.com/gpu": "8", "rdma/ib": "1"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    (memory,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == memory["name"]]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]


def test_pods_know_their_spec_and_the_first_pod():
    (container,) = pod_of(made())["spec"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert len(set(names)) == len(names)
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    (attempt,) = [each["valueFrom"]["fieldRef"] for each in container["env"] if each["name"] == "STRATA_ATTEMPT"]
    assert attempt == {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}
    (pod,) = [each["valueFrom"]["fieldRef"] for each in container["env"] if each["name"] == "STRATA_POD"]
    assert pod == {"fieldPath": "metadata.name"}
    assert load_spec(variables["STRATA_SPEC"]) == SPEC
    assert variables["MASTER_ADDR"] == "bot-w-0-0.bot" and variables["HF_HOME"] == "/cache"
    assert ENVIRONMENT.items() <= variables.items()


def expanded(value, known):
    """The value of a variable as Kubernetes expands it: k8s.io/kubernetes/third_party/forked/golang/expansion."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda found: known.get(found[2], found[0]) if found[2] else "$", value)


def test_kubernetes_changes_no_dollar_of_the_spec_and_puts_no_secret_in_it():
    text = "$$x$$ costs $5 \\$(HF_TOKEN) ${A} $"
    spec = SPEC.model_copy(update={"data": SPEC.data.model_copy(update={"document_separator": text})})
    (container,) = pod_of(made(spec))["spec"]["containers"]
    (value,) = [each["value"] for each in container["env"] if each["name"] == "STRATA_SPEC"]
    assert expanded(text, {"HF_TOKEN": "secret"}) == "$x$ costs $5 \\secret ${A} $"
    assert load_spec(expanded(value, {"HF_TOKEN": "secret"})).data.document_separator == text
    assert load_spec(value) == spec


@pytest.mark.parametrize("names", [["primary"], ["default", "proxy"], ["default", "primary"]], ids="-".join)
def test_a_template_is_taken_whole_or_not_at_all(names):
    inner = TEMPLATE["spec"] | {"containers": [{"name": name} for name in names]}
    with pytest.raises(ValueError, match=f"its containers are {', '.join(names)}; runs without Flyte take"):
        made(template=TEMPLATE | {"spec": inner})


def test_a_run_on_cpus_asks_for_no_gpu():
    spec = RunSpec.model_validate({"output": "/runs"})
    found = pod_of(made(spec))["spec"]
    assert (found["nodeSelector"], found["tolerations"]) == (
        {"pool": "training"},
        [{"key": "team", "operator": "Exists"}],
    )
    assert set(found["containers"][0]["resources"]["limits"]) == {"cpu", "memory", "rdma/ib"}


@pytest.mark.parametrize("run", ["bot", "7b", "a" * 53, "b-" + "c" * 51])
def test_names_are_those_of_hosts(run):
    names = [object_name(run, number) for number in (1, 2, 999)]
    assert len(set(names)) == 3
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", name) and len(f"{name}-w-0-4095") <= 63
    assert object_name("a" * 53, 1) != object_name("a" * 52 + "b", 1)
