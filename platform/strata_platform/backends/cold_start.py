"""Where the time of a run's last start went, phase by phase: from the queue to the second step.

What came before a pod's first process is in the objects of Kubernetes and Kueue, whose times are whole seconds. The
processes measure the rest, and the run's completion record has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strata_platform.backends.kubernetes_objects import (
    RESTART,
    Namespace,
    event_of,
    index_of,
    is_of,
    labels_of,
    seconds_of,
    shape_of,
    time_of,
)
from strata_platform.kubernetes_answers import condition_of
from strata_platform.kubernetes_api import Object
from strata_platform.runs import Event

REASON = "Startup"
# Of the pods of a JobSet, whose owner is not the JobSet but the Job that it made.
_JOB_SET = "jobset.sigs.k8s.io/jobset-uid"


def recorded_events(namespace: Namespace, execution: str) -> list[Event]:
    """Events that Kubernetes and Kueue recorded for an execution's objects, and the start up to its processes."""
    pods, workloads, events = namespace.recorded(execution)
    return [*map(event_of, events), *before_processes(pods, workloads, events)]


def before_processes(pods: Iterable[Object], workloads: Sequence[Object], events: Sequence[Object]) -> list[Event]:
    """The ends of the phases before the first process of the newest training pod of rank 0, as far as they are known.

    Args:
        pods: Of one execution, the oldest first.
        workloads: Of its namespace, or those of the execution.
        events: Of its namespace, the oldest first. They are kept for about an hour; without them the image and the
            container's start are one phase.

    Returns: [] while the container of that pod has not started, and if it was started more than once.
    """
    training = [pod for pod in pods if shape_of(pod) is not None]
    first = next((pod for pod in reversed(training) if index_of(pod) == 0), None)
    status = _status_of(first) if first else None
    if first is None or status is None or status.get("restartCount"):
        return []
    state = status.get("state") or {}
    started = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    scheduled = condition_of(first, "PodScheduled")
    if started is None or scheduled is None or scheduled["status"] != "True":
        return []
    created = seconds_of(first["metadata"]["creationTimestamp"])
    moments = [] if _replaces(first, training) else _queue(first, workloads, events)
    if not moments:
        moments = [("", created)]
    elif created >= moments[-1][1]:
        # A pod that is queued by itself is there before it is admitted.
        moments.append(("job's controller", created))
    moments.append(("scheduler", seconds_of(scheduled["lastTransitionTime"])))
    image = _image(first, status["name"], events)
    moments += [*image, ("container" if image else "image, container", seconds_of(started))]
    found, (_, at) = [], moments[0]
    for name, end in moments[1:]:
        lasted, at = max(end - at, 0.0), max(end, at)
        found.append(Event(at, REASON, f"{name}: {lasted:.0f} s", about=f"pod/{first['metadata']['name']}"))
    return found


def of_record(record: Mapping[str, Any], before: Iterable[Event]) -> list[Event]:
    """The ends of the phases that the processes measured; [] for records of earlier versions.

    Args:
        before: What Kubernetes recorded, in whole seconds. Its container may have started a moment after the process:
            then the phases begin there.
    """
    at, found = record.get("begun"), []
    if at is not None:
        started = max((event.time for event in before if event.reason == REASON), default=at)
        # More than moments are between the starts of two pods.
        at = started if at < started < at + 2 else at
        for phase, seconds in record["startup"].items():
            at += seconds
            found.append(Event(at, REASON, f"{phase}: {seconds:.2f} s"))
    return found


def _status_of(pod: Object) -> Object | None:
    """The status of the training container, the first of the spec; None before the kubelet has written it."""
    # Statuses are in the order of the names: a sidecar's may come first.
    name = pod["spec"]["containers"][0]["name"]
    return next((each for each in pod["status"].get("containerStatuses") or [] if each["name"] == name), None)


def _replaces(pod: Object, training: Iterable[Object]) -> bool:
    """Whether a pod took the place of one that was lost while its job kept its quota: its start had no queue."""
    started = (
        (status.get("state") or {}).get("running", {}).get("startedAt")
        for peer in training
        if _job_of(peer) == _job_of(pod)
        for status in peer["status"].get("containerStatuses") or []
    )
    created = seconds_of(pod["metadata"]["creationTimestamp"])
    restarted = labels_of(pod).get(RESTART, "0") != "0"
    return restarted or any(at is not None and seconds_of(at) < created for at in started)


def _job_of(pod: Object) -> set[str]:
    """The uids of the objects that a pod belongs to: its owner, and its JobSet."""
    owners = {owner["uid"] for owner in pod["metadata"].get("ownerReferences") or []}
    return owners | {uid for name, uid in labels_of(pod).items() if name == _JOB_SET}


def _queue(pod: Object, workloads: Iterable[Object], events: Iterable[Object]) -> list[tuple[str, float]]:
    """Since when Kueue had the pod's workload in its queue, and when it admitted it; [] without Kueue."""
    mine = [workload for workload in workloads if is_of(workload, _job_of(pod) | {pod["metadata"]["uid"]})]
    admitted = condition_of(mine[-1], "Admitted") if mine else None
    if admitted is None or admitted["status"] != "True":
        return []
    end = seconds_of(admitted["lastTransitionTime"])
    if condition_of(mine[-1], "Evicted") is None:
        return [("", seconds_of(mine[-1]["metadata"]["creationTimestamp"])), ("queue", end)]
    # It was admitted before, and the object does not say until when.
    uid = mine[-1]["metadata"]["uid"]
    evictions = [
        at
        for event in events
        if event["involvedObject"].get("uid") == uid and (event.get("reason") or "").startswith("Evicted")
        if (at := seconds_of(time_of(event))) <= end
    ]
    return [("", max(evictions)), ("queue", end)] if evictions else [("", end)]


def _image(pod: Object, container: str, events: Iterable[Object]) -> list[tuple[str, float]]:
    """When the node had mounted the pod's volumes and begun to pull the image, and when it had the image."""
    at = {
        event["reason"]: seconds_of(time_of(event))
        for event in events
        if event["involvedObject"].get("uid") == pod["metadata"]["uid"]
        and event["involvedObject"].get("fieldPath") == f"spec.containers{{{container}}}"
        and event.get("reason") in ("Pulling", "Pulled")
    }
    # Without a Pulling the node had it already.
    return [("volumes", at.get("Pulling", at["Pulled"])), ("image", at["Pulled"])] if "Pulled" in at else []
