"""Where a start's time went, from objects as a cluster has them; tests/e2e reads those of real runs."""

import copy

import pytest

from strata_platform.backends import cold_start

DAY = "2026-11-29T"
POD = {
    "metadata": {
        "name": "run-n2-0-master-0",
        "uid": "uid-master",
        "labels": {
            "execution-id": "run",
            "task-name": "tasks-topology-train-2x1",
            "training.kubeflow.org/replica-index": "0",
        },
        "creationTimestamp": f"{DAY}10:00:43Z",
        "ownerReferences": [{"kind": "PyTorchJob", "name": "run-n2-0", "uid": "uid-job"}],
    },
    "spec": {"containers": [{"name": "pytorch", "env": []}]},
    "status": {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": f"{DAY}10:00:45Z"}],
        "containerStatuses": [
            {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": f"{DAY}10:01:20Z"}}}
        ],
    },
}
WORKLOAD = {
    "metadata": {
        "name": "pytorchjob-run-n2-0-1a2b3",
        "uid": "uid-workload",
        "creationTimestamp": f"{DAY}10:00:01Z",
        "ownerReferences": [{"kind": "PyTorchJob", "name": "run-n2-0", "uid": "uid-job"}],
    },
    "status": {"conditions": [{"type": "Admitted", "status": "True", "lastTransitionTime": f"{DAY}10:00:42Z"}]},
}


def event(reason, at, uid="uid-master", **about):
    about = {"fieldPath": "spec.containers{pytorch}"} if uid == "uid-master" else about
    return {"reason": reason, "lastTimestamp": f"{DAY}{at}Z", "involvedObject": {"uid": uid, **about}}


PULLED = [event("Pulling", "10:00:47"), event("Pulled", "10:01:18")]
EVICTED = {"type": "Evicted", "status": "False", "lastTransitionTime": f"{DAY}10:00:42Z"}


def changed(item, **changes):
    """A copy whose fields at these paths, with `__` for a dot, have other values."""
    item = copy.deepcopy(item)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = item
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
    return item


def evicted(item):
    return changed(item, status__conditions=[*item["status"]["conditions"], EVICTED])


WORKER = changed(
    POD, metadata__uid="uid-worker", metadata__creationTimestamp=f"{DAY}09:59:00Z",
    metadata__labels=POD["metadata"]["labels"] | {"training.kubeflow.org/replica-index": "1"},
    status__containerStatuses=[{"name": "pytorch", "state": {"running": {"startedAt": f"{DAY}09:59:09Z"}}}],
)  # fmt: skip
RUNS_ALONE = [{"kind": "Pod", "uid": "uid-master"}]
STARTED_AGAIN = [{"name": "pytorch", "restartCount": 1, "state": {"running": {"startedAt": f"{DAY}10:09:00Z"}}}]
WAITS = [{"name": "pytorch", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}]
JOB, CASES = ["job's controller: 1 s", "scheduler: 2 s"], {}
CASES["queued, pulled"] = (
    [POD], [WORKLOAD], PULLED, ["queue: 41 s", *JOB, "volumes: 2 s", "image: 31 s", "container: 2 s"]
)  # fmt: skip
CASES["the image was there"] = (
    [POD], [WORKLOAD], PULLED[1:], ["queue: 41 s", *JOB, "volumes: 33 s", "image: 0 s", "container: 2 s"]
)  # fmt: skip
CASES["the events are gone"] = ([POD], [WORKLOAD], [], ["queue: 41 s", *JOB, "image, container: 35 s"])
CASES["another container's image"] = (
    [POD], [WORKLOAD], [changed(PULLED[1], involvedObject__fieldPath="spec.initContainers{wait}")],
    ["queue: 41 s", *JOB, "image, container: 35 s"],
)  # fmt: skip
CASES["no Kueue"] = ([POD], [], [], ["scheduler: 2 s", "image, container: 35 s"])
CASES["queued by itself"] = (
    [changed(POD, metadata__creationTimestamp=f"{DAY}10:00:00Z", metadata__ownerReferences=[])],
    [changed(WORKLOAD, metadata__ownerReferences=RUNS_ALONE)], [],
    ["queue: 41 s", "scheduler: 3 s", "image, container: 35 s"],
)  # fmt: skip
CASES["admitted again"] = (
    [POD], [evicted(WORKLOAD)],
    [event("EvictedDueToPreempted", "10:00:30", "uid-workload"), event("Admitted", "10:00:42", "uid-workload")],
    ["queue: 12 s", *JOB, "image, container: 35 s"],
)  # fmt: skip
CASES["admitted again, the eviction's event is gone"] = (
    [POD], [evicted(WORKLOAD)], [], [*JOB, "image, container: 35 s"]
)  # fmt: skip
CASES["in place of a pod that was lost"] = (
    [WORKER, POD], [WORKLOAD], [], ["scheduler: 2 s", "image, container: 35 s"]
)  # fmt: skip
# A JobSet's Job owns its pods, and Kueue's workload is the JobSet's.
OF_JOB_SET = changed(
    POD, metadata__ownerReferences=[{"kind": "Job", "name": "run-w-0", "uid": "uid-inner"}],
    metadata__labels={"strata/shape": "2x1", "batch.kubernetes.io/job-completion-index": "0",
                      "jobset.sigs.k8s.io/jobset-uid": "uid-job", "jobset.sigs.k8s.io/restart-attempt": "0"},
)  # fmt: skip
CASES["a JobSet"] = ([OF_JOB_SET], [WORKLOAD], [], ["queue: 41 s", *JOB, "image, container: 35 s"])
RESTARTED = changed(OF_JOB_SET)
RESTARTED["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] = "1"
CASES["a JobSet that restarted its pods"] = ([RESTARTED], [WORKLOAD], [], ["scheduler: 2 s", "image, container: 35 s"])
CASES["the container starts again"] = ([changed(POD, status__containerStatuses=STARTED_AGAIN)], [WORKLOAD], [], [])
CASES["has not started"] = ([changed(POD, status__containerStatuses=WAITS)], [WORKLOAD], PULLED, [])
SIDECAR = {"name": "istio-proxy", "restartCount": 3, "state": {"running": {"startedAt": f"{DAY}10:09:00Z"}}}
CASES["a sidecar whose name is first"] = (
    [
        changed(
            POD, status__containerStatuses=[SIDECAR, *POD["status"]["containerStatuses"]],
            spec__containers=[*POD["spec"]["containers"], {"name": "istio-proxy"}],
        )
    ],
    [WORKLOAD], PULLED, ["queue: 41 s", *JOB, "volumes: 2 s", "image: 31 s", "container: 2 s"],
)  # fmt: skip
CASES["no pod"] = ([], [WORKLOAD], PULLED, [])


@pytest.mark.parametrize("case", CASES)
def test_the_phases_before_the_first_process_are_those_of_the_objects(case):
    pods, workloads, events, expected = CASES[case]
    found = cold_start.before_processes(pods, workloads, events)
    assert [event.message for event in found] == expected
    assert {(event.reason, event.about) for event in found} <= {("Startup", "pod/run-n2-0-master-0")}
    # The sum is the time from the first moment to the last, whose end is that of the container's start.
    assert [event.time for event in found] == sorted(event.time for event in found)
    if found:
        assert found[-1].time == cold_start._seconds(f"{DAY}10:01:20Z")
