"""What the queues of a tenant can never admit is refused before it waits."""

import json

import pytest
from typer.testing import CliRunner

from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.cli import app
from strata_platform.errors import BackendError
from strata_platform.queue_shares import Shares
from strata_platform.spec import RunSpec
from tests.platform.helpers.servers import NAMESPACE


def quota(flavor, **resources):
    return {"flavor": flavor, "resources": {
        {"gpu": "nvidia.com/gpu"}.get(name, name): value if isinstance(value, dict) else {"nominal": value}
        for name, value in resources.items()}}  # fmt: skip


GIVEN = {
    "required": True,
    "unqueuedLimits": {"cpu": "16", "memory": "64Gi"},
    "queues": {"small": "small", "language": "language", "theirs": "made-elsewhere", "slices": "slices",
               "pods": "pods"},
    "clusterQueues": [
        {"name": "small", "quotas": [quota("cpu", cpu="1600m", memory="8Gi")]},
        {"name": "slices", "quotas": [quota("mig", cpu=1, memory="64Gi", **{"nvidia.com/mig-3g.40gb": 7})]},
        {"name": "pods", "quotas": [quota("nodes", cpu=64, memory="64Gi", gpu=16, pods=1, **{"rdma/ib": 8})]},
        {"name": "language", "cohort": "all", "quotas": [
            quota("h200", cpu=64, memory="512Gi", gpu={"nominal": 8, "borrowingLimit": 16}),
            quota("a100", cpu=64, memory="512Gi", gpu=4)]},
        {"name": "speech", "cohort": "all", "quotas": [
            quota("h200", cpu=256, memory="2Ti", gpu={"nominal": 64, "lendingLimit": 12})]},
    ],
    "podTemplates": {"rdma": {"rdma/ib": 4}, "many": {"rdma/ib": 16, "memory": "1Ti"}, "shared": {"rdma/hca": 1},
                     "gpus": {"nvidia.com/gpu": 32}},
}  # fmt: skip


def problem(given=GIVEN, nnodes=1, is_job=True, **resources):
    gpu = resources.get("gpu", 0)
    spec = {"topology": {"nnodes": nnodes, "nproc_per_node": gpu or 1}, "output": "/runs",
            "parallel": {"type": "ddp" if nnodes * (gpu or 1) > 1 else "single"},
            "resources": {"cpu": "1", "memory": "1Gi", **resources}}  # fmt: skip
    run = RunSpec.model_validate(spec)
    return Shares.parse(json.dumps(given)).problem(run.resources, run.topology, is_job=is_job)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"queue": "small"}, None),
        ({"queue": "small", "cpu": "800m", "nnodes": 2}, None),
        ({"queue": "typo"}, "resources.queue: there is no queue 'typo', only: small, language, theirs, slices, pods"),
        ({}, "resources.queue: unset, and runs have to name one of the queues: small, language, theirs, slices, pods"),
        ({"queue": "small", "cpu": "801m", "nnodes": 2},
         "all pods together ask for 1.602 CPUs and at most 1.6 CPUs can be had in flavor cpu, so queue 'small' would "
         "never admit the run; queue language can"),
        ({"queue": "small", "memory": "9Gi"}, "ask for 9 GiB of memory and at most 8 GiB of memory can be had"),
        # A queue without a quota of GPUs.
        ({"queue": "small", "gpu": 1}, "ask for 1 GPUs and at most 0 GPUs can be had"),
        # 8 of its own, and the 12 that others lend of the 16 that it may borrow.
        ({"queue": "language", "gpu": 4, "nnodes": 4}, None),
        ({"queue": "language", "gpu": 8, "nnodes": 2, "cpu": 128, "memory": "512Gi"}, None),
        ({"queue": "language", "gpu": 1, "nnodes": 20}, None),
        ({"queue": "language", "gpu": 1, "nnodes": 21},
         "ask for 21 GPUs and at most 20 GPUs can be had in flavor h200; all pods together ask for 21 GPUs and at most "
         "4 GPUs can be had in flavor a100, so queue 'language' would never admit the run; "
         "no other queue of the tenant can"),
        # CPUs of the whole cohort.
        ({"queue": "language", "gpu": 1, "cpu": 321}, "ask for 321 CPUs and at most 320 CPUs can be had in"),
        # A quota of other devices.
        ({"queue": "language", "gpu": 1, "gpu_resource": "nvidia.com/mig-3g.40gb"},
         "ask for 1 nvidia.com/mig-3g.40gb and at most 0 nvidia.com/mig-3g.40gb can be had"),
        ({"queue": "slices", "gpu": 1, "gpu_resource": "nvidia.com/mig-3g.40gb"}, None),
        ({"queue": "slices", "gpu": 1, "gpu_resource": "amd.com/gpu"}, "at most 0 amd.com/gpu can be had"),
        # A quota of pods, and of devices that a variant of the pod template asks for.
        ({"queue": "pods"}, None),
        ({"queue": "pods", "nnodes": 2},
         "all pods together ask for 2 pods and at most 1 pods can be had in flavor nodes, so queue 'pods' would "
         "never admit the run; queue language can"),
        ({"queue": "pods", "pod_template": "rdma"}, None),
        ({"queue": "pods", "pod_template": "unknown"}, None),
        ({"queue": "pods", "pod_template": "many"}, "ask for 16 rdma/ib and at most 8 rdma/ib can be had"),
        # Kueue may be configured to ignore devices without a quota.
        ({"queue": "pods", "pod_template": "shared"}, None),
        # A run's own GPUs replace the template's.
        ({"queue": "pods", "pod_template": "gpus"}, "ask for 32 nvidia.com/gpu and at most 16 nvidia.com/gpu can"),
        ({"queue": "pods", "pod_template": "gpus", "gpu": 8}, None),
        # Nothing is known of a cluster queue that the chart did not make.
        ({"queue": "theirs", "gpu": 64}, None),
    ],
)  # fmt: skip
def test_the_largest_admission_decides(run, said):
    found = problem(**run)
    assert found is None if said is None else said in found, found


def test_a_queue_called_default_is_for_runs_that_name_none():
    given = GIVEN | {"queues": {"default": "small"}}
    assert problem(given) is None
    assert "queue 'default' would never admit the run" in problem(given, cpu="2")
    assert problem(GIVEN | {"required": False, "queues": {}}) is None


@pytest.mark.parametrize(
    ("run", "admitted"),
    [
        ({"cpu": "16", "memory": "64Gi"}, True),
        ({"cpu": "16", "memory": "64Gi", "is_job": True}, False),
        ({"cpu": "16001m"}, False),
        ({"memory": "65Gi"}, False),
        ({"gpu": 1}, False),
        ({"cpu": "64", "given": {name: value for name, value in GIVEN.items() if name != "unqueuedLimits"}}, True),
    ],
)
def test_without_a_queue_a_run_is_refused_where_the_policy_rejects_its_pod(run, admitted):
    found = problem(**{"is_job": False, **run})
    assert (found is None) == admitted and (admitted or "have to name one of the queues" in found)


def test_a_small_run_of_one_pod_needs_no_queue_with_flyte_and_one_without(client, admin, kubernetes):
    admin.active = "v1"
    kubernetes.content["configmaps"]["strata-queues"] = (200, {"shares.json": json.dumps(GIVEN)})
    client.submit(RunSpec.model_validate({"name": "small"}))
    assert [request.name for request in admin.created] == ["small"]
    alone = KubernetesBackend(NAMESPACE)
    with pytest.raises(BackendError, match="unset, and runs have to name one of the queues"):
        alone.require_admission(RunSpec().resources, RunSpec().topology)


def test_without_flyte_gpus_are_nvidias_unless_the_spec_says_so_and_with_it_the_configuration_does(
    client, admin, kubernetes
):
    admin.active = "v1"
    queues = [{"name": "amd", "quotas": [quota("mi300x", cpu=64, memory="512Gi", **{"amd.com/gpu": 8})]}]
    shares = {"required": True, "queues": {"default": "amd"}, "clusterQueues": queues}
    kubernetes.content["configmaps"]["strata-queues"] = (200, {"shares.json": json.dumps(shares)})
    plain, named = (
        RunSpec.model_validate({"name": "amd", "output": "/runs", "resources": {"gpu": 1, **more}})
        for more in ({}, {"gpu_resource": "amd.com/gpu"})
    )
    client.submit(plain)
    with pytest.raises(BackendError, match=r"'amd.com/gpu' is for runs without Flyte, whose configuration names"):
        client.submit(named)
    alone = KubernetesBackend(NAMESPACE)
    alone.require_admission(named.resources, named.topology)
    with pytest.raises(BackendError, match=r"ask for 1 nvidia.com/gpu and at most 0 nvidia.com/gpu can be had"):
        alone.require_admission(plain.resources, plain.topology)


def test_submit_and_estimate_ask_the_cluster(client, admin, kubernetes, tmp_path, monkeypatch, caplog):
    admin.active = "v1"
    wrong = RunSpec.model_validate({"resources": {"queue": "typo"}})
    # A cluster with queues that others made.
    client.submit(RunSpec.model_validate({"name": "first", "resources": {"queue": "typo"}}))
    kubernetes.content["configmaps"]["strata-queues"] = (200, {"shares.json": json.dumps(GIVEN)})
    with pytest.raises(
        BackendError, match="there is no queue 'typo', only: small, language, theirs, slices, pods"
    ) as caught:
        client.submit(wrong)
    assert (caught.value.status, caught.value.reason) == (422, "Inadmissible")
    assert [request.name for request in admin.created] == ["first"]

    monkeypatch.setenv("FLYTECTL_CONFIG", str(tmp_path / "flyte.yaml"))
    monkeypatch.setenv("STRATA_BACKEND", "flyte")
    (tmp_path / "spec.yaml").write_text(wrong.model_dump_json())
    done = CliRunner().invoke(app, ["estimate", str(tmp_path / "spec.yaml")])
    assert done.exit_code == 1 and "error: resources.queue: there is no queue 'typo'" in done.stderr
    client.submit(wrong, force=True)
    # Who may not read it is told, and may submit.
    kubernetes.content["configmaps"]["strata-queues"] = (403, {})
    client.submit(RunSpec.model_validate({"name": "unknown"}))
    assert caplog.messages == [
        "cannot check whether a queue admits the run: Kubernetes refused to read the config map strata-queues: you may "
        "not"
    ]
