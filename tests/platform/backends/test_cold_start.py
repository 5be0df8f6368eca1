"""Where a start's time went, from objects of real runs (recordings/), and from those with other times."""

import copy
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from strata_platform.backends import cold_start
from strata_platform.backends.kubernetes_objects import event_of, index_of

RECORDED = {
    path.stem: tuple(yaml.safe_load(path.read_text()).values())
    for path in (Path(__file__).parent / "recordings").glob("*.yaml")
}


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


def at(time):
    return f"2026-11-29T{time}Z"


def scheduled(pod, time):
    others = [each for each in pod["status"]["conditions"] if each["type"] != "PodScheduled"]
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(time)}
    return changed(pod, status__conditions=[*others, condition])


def started(pod, time, **more):
    """With the status of a container that runs since then."""
    status = {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": at(time)}}} | more
    return changed(pod, status__containerStatuses=[status])


# With times that tell the phases apart.
(RECORDED_POD,), (WORKLOAD,), EVENTS = RECORDED["flyte"]
POD = started(scheduled(changed(RECORDED_POD, metadata__creationTimestamp=at("06:36:10")), "06:36:12"), "06:36:47")
(THERE,) = [event for event in EVENTS if event["reason"] == "Pulled"]
PULLED = [
    changed(THERE, reason=reason, lastTimestamp=at(time))
    for reason, time in (("Pulling", "06:36:14"), ("Pulled", "06:36:45"))
]
WORKER = changed(
    started(POD, "06:34:09"), metadata__uid="uid-worker", metadata__creationTimestamp=at("06:34:00"),
    metadata__labels=POD["metadata"]["labels"] | {"training.kubeflow.org/replica-index": "1"},
)  # fmt: skip
RUNS_ALONE = [{"kind": "Pod", "uid": POD["metadata"]["uid"]}]
*AGAIN, EVENTS_OF_BOTH = RECORDED["preempted"]
NO_EVICTION = [event for event in EVENTS_OF_BOTH if not event["reason"].startswith("Evicted")]
AT_ONCE = ["job's controller: 0 s", "scheduler: 0 s"]
THERE_ALREADY = ["volumes: 1 s", "image: 0 s", "container: 0 s"]
JOB, CASES = ["job's controller: 1 s", "scheduler: 2 s"], {}
CASES["recorded: queued, with Flyte"] = (*RECORDED["flyte"], ["queue: 12 s", *AT_ONCE, *THERE_ALREADY])
CASES["recorded: admitted again after a preemption"] = (
    *RECORDED["preempted"],
    ["queue: 12 s", *AT_ONCE, *THERE_ALREADY],
)
CASES["recorded: the same, the eviction's event is gone"] = (
    *AGAIN, NO_EVICTION, [*AT_ONCE, *THERE_ALREADY]
)  # fmt: skip
CASES["recorded: a JobSet"] = (*RECORDED["job_set"], ["queue: 0 s", *AT_ONCE, *THERE_ALREADY])
CASES["recorded: a JobSet that restarted its pods"] = (
    *RECORDED["restarted_job_set"],
    ["scheduler: 0 s", *THERE_ALREADY],
)
CASES["recorded: an image that the node does not have"] = (
    *RECORDED["pulled"], ["queue: 0 s", *AT_ONCE, "volumes: 0 s", "image: 5 s", "container: 0 s"]
)  # fmt: skip
CASES["queued, pulled"] = (
    [POD], [WORKLOAD], PULLED, ["queue: 12 s", *JOB, "volumes: 2 s", "image: 31 s", "container: 2 s"]
)  # fmt: skip
CASES["the image was there"] = (
    [POD], [WORKLOAD], PULLED[1:], ["queue: 12 s", *JOB, "volumes: 33 s", "image: 0 s", "container: 2 s"]
)  # fmt: skip
CASES["the events are gone"] = ([POD], [WORKLOAD], [], ["queue: 12 s", *JOB, "image, container: 35 s"])
CASES["another container's image"] = (
    [POD], [WORKLOAD], [changed(PULLED[1], involvedObject__fieldPath="spec.initContainers{wait}")],
    ["queue: 12 s", *JOB, "image, container: 35 s"],
)  # fmt: skip
CASES["no Kueue"] = ([POD], [], [], ["scheduler: 2 s", "image, container: 35 s"])
CASES["queued by itself"] = (
    [changed(POD, metadata__creationTimestamp=at("06:35:57"), metadata__ownerReferences=[])],
    [changed(WORKLOAD, metadata__ownerReferences=RUNS_ALONE)], [],
    ["queue: 12 s", "scheduler: 3 s", "image, container: 35 s"],
)  # fmt: skip
CASES["in place of a pod that was lost"] = (
    [WORKER, POD], [WORKLOAD], [], ["scheduler: 2 s", "image, container: 35 s"]
)  # fmt: skip
CASES["the container starts again"] = ([started(POD, "06:44:00", restartCount=1)], [WORKLOAD], [], [])
WAITS = {"waiting": {"reason": "ContainerCreating"}}
CASES["has not started"] = ([started(POD, "06:36:47", state=WAITS)], [WORKLOAD], PULLED, [])
SIDECAR = {"name": "istio-proxy", "restartCount": 3, "state": {"running": {"startedAt": at("06:45:00")}}}
CASES["a sidecar whose name is first"] = (
    [
        changed(
            POD, status__containerStatuses=[SIDECAR, *POD["status"]["containerStatuses"]],
            spec__containers=[*POD["spec"]["containers"], {"name": "istio-proxy"}],
        )
    ],
    [WORKLOAD], PULLED, ["queue: 12 s", *JOB, "volumes: 2 s", "image: 31 s", "container: 2 s"],
)  # fmt: skip
CASES["no pod"] = ([], [WORKLOAD], PULLED, [])


@pytest.mark.parametrize("case", CASES)
def test_the_phases_before_the_first_process_are_those_of_the_objects(case):
    pods, workloads, events, expected = CASES[case]
    found = cold_start.before_processes(pods, workloads, events)
    assert [event.message for event in found] == expected
    # The sum is the time from the first moment to the last, whose end is that of the container's start.
    assert [event.time for event in found] == sorted(event.time for event in found)
    if found:
        first = next(pod for pod in reversed(pods) if index_of(pod) == 0)
        assert {(event.reason, event.about) for event in found} == {("Startup", f"pod/{first['metadata']['name']}")}
        state = next(each for each in first["status"]["containerStatuses"] if each["name"] != "istio-proxy")["state"]
        (begun,) = (each["startedAt"] for each in state.values())
        assert found[-1].time == datetime.fromisoformat(begun).timestamp()


def test_the_phases_of_processes_follow_the_start_of_their_container():
    pods, workloads, events, _ = CASES["a sidecar whose name is first"]
    before = cold_start.before_processes(pods, workloads, events)
    record = {"begun": before[-1].time - 0.02, "startup": {"code": 0.01, "imports": 3.0}}
    found = sorted([*before, *cold_start.of_record(record, before)], key=lambda event: event.time)
    assert [event.message.partition(":")[0] for event in found[-3:]] == ["container", "code", "imports"]
    # Those of an earlier start do not move them.
    assert cold_start.of_record({**record, "begun": before[-1].time + 5}, before)[0].time == before[-1].time + 5.01


def test_an_event_that_was_seen_again_has_the_time_of_the_last_one():
    finished = [event for event in EVENTS if event["reason"] == "FinishedWorkload"]
    # Kueue's events have no lastTimestamp, and those that are seen again are counted as a series.
    assert all("lastTimestamp" not in event for event in finished)
    seen = [datetime.fromisoformat(event["series"]["lastObservedTime"]).timestamp() for event in finished]
    assert [event_of(event).time for event in finished] == seen and len(seen) == 2
