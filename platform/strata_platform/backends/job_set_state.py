"""What a JobSet, its pods and its workload in Kueue show of a run: whether and how it has ended, and what it held."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strata_platform.backends.job_set import CANCELED, CAUSE, text_of_spec
from strata_platform.backends.kubernetes_objects import (
    WORKLOADS,
    Namespace,
    index_of,
    is_given_up,
    is_of,
    is_over_time,
    labels_of,
    seconds_of,
)
from strata_platform.backends.pod_logs import has_begun
from strata_platform.backends.pod_progress import reported
from strata_platform.backends.run_state import RESUBMIT
from strata_platform.kubernetes_answers import condition_of
from strata_platform.kubernetes_api import Object
from strata_platform.pod_settings import QUEUE
from strata_platform.runs import Held, Phase, Run

log = logging.getLogger(__name__)

_OVER_TIME = "it held its machines for longer than resources.time_limit and the time of a start; raise time_limit"
_GIVEN_UP = (
    "Kueue has given it up ({}): its pods did not start, or an admission check rejects it; 'strata events' has the "
    "reason: mend that, then submit it again"
)


def end_of(
    job: Object, namespace: Namespace, pods: Sequence[Object] | None, workloads: Sequence[Object] | None
) -> tuple[Phase, str, float | None]:
    """The phase, as far as the JobSet shows it, with the reason and time of its end.

    pods, workloads: those of the JobSet and of the namespace, if they are known; they are listed where they count.
    """
    for kind, phase in (("Completed", Phase.SUCCEEDED), ("Failed", Phase.FAILED)):
        condition = condition_of(job, kind)
        if condition is not None and condition["status"] == "True":
            message = "" if phase is Phase.SUCCEEDED else (_last_words(pods or ()) or condition.get("message", ""))
            return phase, message, seconds_of(condition["lastTransitionTime"])
    if (stopped := _stopped(job, namespace, workloads)) is None:
        return Phase.RUNNING, "", None
    left = namespace.pods(job["metadata"]["name"]) if pods is None else pods
    if any(pod["status"].get("phase") in ("Pending", "Running") for pod in left):
        why = "canceled" if stopped[0] is Phase.ABORTED else "given up by Kueue"
        return Phase.RUNNING, f"{why}; its pods are ending", None
    return stopped


def _stopped(job: Object, namespace: Namespace, workloads: Sequence[Object] | None) -> tuple[Phase, str, float] | None:
    """The end of a run that somebody canceled, or that Kueue has given up.

    Its JobSet is merely suspended.
    """
    annotations = job["metadata"].get("annotations") or {}
    if (canceled := annotations.get(CANCELED)) is not None:
        return Phase.ABORTED, annotations.get(CAUSE, f"canceled; {RESUBMIT}"), float(canceled)
    if may_be_given_up(job):
        for workload in namespace.list(WORKLOADS) if workloads is None else workloads:
            if is_of(workload, {job["metadata"]["uid"]}) and is_given_up(workload):
                evicted = condition_of(workload, "Evicted") or {}
                why = _OVER_TIME if is_over_time(workload) else _GIVEN_UP.format(evicted.get("message", ""))
                return Phase.FAILED, why, seconds_of(evicted["lastTransitionTime"])
    return None


def may_be_given_up(job: Object) -> bool:
    """Whether Kueue holds a JobSet back; one that it has given up is merely suspended."""
    return QUEUE in labels_of(job) and bool(job["spec"].get("suspend"))


def has_succeeded(pod: Object) -> bool:
    """Whether all containers of a pod ended with exit code 0."""
    return bool(pod["status"].get("phase") == "Succeeded")


def _last_words(pods: Sequence[Object]) -> str:
    """The error of the pod that ended first with one, by the last lines of its log."""
    found = []
    for pod in filter(has_begun, pods):
        for status in pod["status"].get("containerStatuses") or []:
            ended = (status.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode") and ended.get("message"):
                lines = ended["message"].strip().splitlines()
                begin = max((at for at, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 1)
                found.append((ended.get("finishedAt", ""), "\n".join(lines[begin:]).removeprefix("error: ")))
    return min(found)[1] if found else ""


def record_of(namespace: Namespace, pods: Sequence[Object]) -> Mapping[str, Any] | None:
    """The completion record in the log of the pod of rank 0; None if the pod is removed."""
    for pod in pods:
        if index_of(pod) == 0 and has_succeeded(pod):
            for value in reported(namespace, pod, last=50):
                if "record" in value:
                    record: Mapping[str, Any] = value["record"]
                    return record
    return None


def held_by(job: Object, run: Run, workloads: Sequence[Object]) -> list[Held] | None:
    """What a JobSet held while Kueue admitted it; without a queue, from its creation to its end. None: not known."""
    mine = [workload for workload in workloads if is_of(workload, {job["metadata"]["uid"]})]
    if QUEUE in labels_of(job) and not mine:
        log.warning("the GPU hours of %s are unknown: Kueue's workload of %s is gone", run.name, run.where)
        return None
    until = run.ended or time.time()
    seconds = sum(_admitted_seconds(each, until) for each in mine) if mine else until - (run.submitted or until)
    spec = json.loads(text_of_spec(job))
    resources, topology = spec["resources"], spec["topology"]
    gpu = (resources["gpu_type"] or "") if resources["gpu"] else None
    return [Held(seconds, topology["nnodes"] * topology["nproc_per_node"], gpu)] if seconds else []


def _admitted_seconds(workload: Object, until: float) -> float:
    """Seconds for which a workload had its quota, over all its admissions."""
    past = float((workload.get("status") or {}).get("accumulatedPastExecutionTimeSeconds") or 0)
    admitted = condition_of(workload, "Admitted") or {}
    return past + (until - seconds_of(admitted["lastTransitionTime"]) if admitted.get("status") == "True" else 0.0)
