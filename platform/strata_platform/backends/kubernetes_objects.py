"""The Kubernetes objects of a run: pods, training jobs, Kueue's workloads for both, and events."""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from strata_platform.backends.api_errors import translated_errors
from strata_platform.errors import BackendError
from strata_platform.kubernetes_answers import condition_of, is_true
from strata_platform.kubernetes_api import Access, ApiError, KubernetesApi, Object, items_if_installed
from strata_platform.queue_shares import CONFIG_MAP, KEY, Shares
from strata_platform.runs import Event, Stage

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Resources, Topology

log = logging.getLogger(__name__)

JOBS = ("kubeflow.org", "v1", "pytorchjobs")
WORKLOADS = ("kueue.x-k8s.io", "v1beta2", "workloads")
EXECUTION, TASK, REPLICA = "execution-id", "task-name", "training.kubeflow.org/replica-index"
# Labels of the pods of a JobSet: pods and processes per pod, which Strata sets, and those that Kubernetes sets.
SHAPE, INDEX, RESTART = "strata/shape", "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/restart-attempt"

FINISH = "tasks-finish-finish"
"""The task that evaluates and exports."""
# The stage of a pod, by the beginning of its task's name. Training pods report theirs in progress lines, and the pod
# that evaluates reports when it exports.
_STAGES = {
    "workflows-finetune": Stage.PREPARING,
    "tasks-prepare": Stage.PREPARING,
    FINISH: Stage.EVALUATING,
}
# Kueue's reasons when it has given up a workload: how all begin, and that of one that held its machines for too long.
# Others are ...RequeuingLimitExceeded and ...AdmissionCheck. After a person's change the reason is Deactivated.
_GIVEN_UP, _OVER_TIME = "DeactivatedDueTo", "DeactivatedDueToMaximumExecutionTimeExceeded"
# What Kueue says of a flavor whose whole quota is too small, and of one that is merely used by others.
_NEVER, _LATER = "> maximum capacity", "unused quota"
_TRAINING = re.compile(r"tasks-topology-train-(\d+)x(\d+)$")
_SHAPE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True)
class Origin:
    """How the objects of a run are known, by what made them."""

    label: str
    """Label with the name of the execution."""
    jobs: tuple[str, str, str]
    """Group, version and plural of its training jobs."""
    part: str
    """Regular expression of what the names of objects of an execution have after its own name."""


FLYTE = Origin(EXECUTION, JOBS, r"-n\d")
JOB_SET = Origin("strata/execution", ("jobset.x-k8s.io", "v1alpha2", "jobsets"), r"-w-0")


@dataclass(frozen=True)
class RunStatus:
    """Stage and position in the queue of a run, as far as its objects show them."""

    stage: Stage
    message: str = ""
    queue: str | None = None
    position: int | None = None


class Namespace:
    """Reads the objects of a tenant's namespace. Every method raises errors of `strata_platform.errors`."""

    def __init__(self, namespace: str, context: str | None = None, origin: Origin = FLYTE) -> None:
        self.namespace, self.origin = namespace, origin
        with translated_errors("to read its configuration"):
            self.api = KubernetesApi(Access.of_environment(context))
        self.core = f"/api/v1/namespaces/{namespace}"

    def pods(self, execution: str) -> list[Object]:
        """The pods of an execution, the oldest first."""
        with translated_errors(f"to list the pods of {execution}"):
            found = self.api.items(f"{self.core}/pods", labelSelector=f"{self.origin.label}={execution}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def status(self, execution: str, pods: Sequence[Object]) -> RunStatus:
        """Stage of an execution that has these pods."""
        return status_of(pods, self.list(WORKLOADS), self._uids(execution, pods))

    def statuses(self, executions: Iterable[str]) -> dict[str, RunStatus]:
        """Stages of many executions, in three requests."""
        with translated_errors("to list the pods of all runs"):
            pods = self.api.items(f"{self.core}/pods", labelSelector=self.origin.label)
        pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        label = self.origin.label
        jobs, workloads = self.list(self.origin.jobs, label), self.list(WORKLOADS)
        found = {}
        for execution in executions:
            mine = [pod for pod in pods if labels_of(pod).get(label) == execution]
            uids = {item["metadata"]["uid"] for item in (*mine, *jobs) if labels_of(item).get(label) == execution}
            found[execution] = status_of(mine, workloads, uids)
        return found

    def recorded(self, execution: str) -> tuple[list[Object], list[Object], list[Object]]:
        """An execution's pods, the oldest first, its workloads, and the events recorded for them and its jobs.

        Kubernetes keeps events for about an hour. Objects that exist are found by their labels. Events of deleted ones
        are found by a name that begins with the execution's; Flyte hashes names of more than 50 characters, which are
        then missed.
        """
        pods = self.pods(execution)
        mine = self._uids(execution, pods)
        workloads = [workload for workload in self.list(WORKLOADS) if is_of(workload, mine)]
        mine |= {workload["metadata"]["uid"] for workload in workloads}
        gone = re.compile(rf"(?:(?:pod|pytorchjob|jobset)-)?{re.escape(execution)}(?:{self.origin.part}|$)")
        with translated_errors(f"to list the events of {execution}"):
            found = self.api.items(f"{self.core}/events")
        about = ((item, item["involvedObject"]) for item in found)
        events = [item for item, its in about if its.get("uid") in mine or gone.match(its.get("name", ""))]
        return pods, workloads, sorted(events, key=time_of)

    def hopeless(self, before: datetime) -> dict[str, Object]:
        """Workloads of runs that wait since `before` a time or longer and can never be admitted, by execution."""
        found = [each for each in self.list(WORKLOADS) if is_hopeless(each) and waits_since(each) <= before]
        if not found:
            return {}
        label = self.origin.label
        with translated_errors("to list the pods of all runs"):
            pods = self.api.items(f"{self.core}/pods", labelSelector=label)
        owners = [*pods, *self.list(self.origin.jobs, label)]
        return {
            labels_of(owner)[label]: workload
            for workload in found
            for owner in owners
            if is_of(workload, {owner["metadata"]["uid"]})
        }

    def _uids(self, execution: str, pods: Sequence[Object]) -> set[str]:
        """The uids of an execution's pods and jobs."""
        jobs = self.list(self.origin.jobs, f"{self.origin.label}={execution}")
        return {item["metadata"]["uid"] for item in (*pods, *jobs)}

    def text(self, config_map: str, key: str) -> str | None:
        """The value of a ConfigMap's key; None if there is no such map or key."""
        with translated_errors(f"to read the config map {config_map}"):
            try:
                data = self.api.get(f"{self.core}/configmaps/{config_map}").get("data")
            except ApiError as error:
                if error.status != 404:
                    raise
                return None
        return (data or {}).get(key)

    def list(self, kind: tuple[str, str, str], labels: str = "") -> builtins.list[Object]:
        """The objects of a kind, with these labels; [] where the kind is not installed."""
        group, version, plural = kind
        with translated_errors(f"to list {plural}"):
            # Without Kueue nothing queues, without the operator there are no such jobs.
            path = f"/apis/{group}/{version}/namespaces/{self.namespace}/{plural}"
            return items_if_installed(self.api, path, labelSelector=labels)


def require_admission(namespace: Callable[[], Namespace], resources: Resources, topology: Topology) -> None:
    """Raises BackendError if the queues of the tenant can never admit a run. Warns if that is not known."""
    try:
        where = namespace()
        text = where.text(CONFIG_MAP, KEY)
    except BackendError as error:
        log.warning("cannot check whether a queue admits the run: %s", error)
        return
    is_job = where.origin is JOB_SET or topology.nnodes > 1
    if text is not None and (problem := Shares.parse(text).problem(resources, topology, is_job=is_job)):
        raise BackendError(problem, status=422, reason="Inadmissible")


def labels_of(item: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of an object."""
    return item["metadata"].get("labels") or {}


def shape_of(pod: Object) -> tuple[int, int] | None:
    """Pods and processes per pod of the training job that the pod belongs to; None for any other pod."""
    found = _TRAINING.match(task_of(pod)) or _SHAPE.fullmatch(labels_of(pod).get(SHAPE, ""))
    return (int(found[1]), int(found[2])) if found else None


def index_of(pod: Object) -> int:
    """The number of a pod within its training job, from 0."""
    labels = labels_of(pod)
    return int(labels.get(REPLICA) or labels.get(INDEX) or 0)


def attempt_of(pod: Object) -> int:
    """Which attempt of the training job a pod is of, from 0."""
    variables = pod["spec"]["containers"][0].get("env") or []
    flytes = (item["value"] for item in variables if item["name"] == "FLYTE_ATTEMPT_NUMBER")
    return int(next(flytes, labels_of(pod).get(RESTART, 0)))


def task_of(pod: Object) -> str:
    """The name of the Flyte task that a pod is of, as in its label."""
    return labels_of(pod).get(TASK, "")


def status_of(pods: Sequence[Object], workloads: Sequence[Object], mine: set[str]) -> RunStatus:
    """Stage of a run, by its `pods`, all workloads of its namespace, and the uids of its own pods and jobs (`mine`)."""
    waiting = [workload for workload in workloads if is_of(workload, mine) and _is_waiting(workload)]
    if waiting:
        return _in_queue(waiting[-1], workloads)
    active = [
        pod
        for pod in pods
        if pod["status"].get("phase") in ("Pending", "Running") and "deletionTimestamp" not in pod["metadata"]
    ]
    if not active:
        return RunStatus(Stage.STARTING)
    task = task_of(active[-1])
    peers = [pod for pod in active if task_of(pod) == task]
    for pod in peers:
        if pod["status"]["phase"] == "Pending":
            return _pending(pod)
    stages = (stage for start, stage in _STAGES.items() if task.startswith(start))
    return RunStatus(next(stages, Stage.STARTING))


def _pending(pod: Object) -> RunStatus:
    """Stage of a run with a pending pod: gated, unscheduled, or about to start."""
    name, status = pod["metadata"]["name"], pod["status"]
    if pod["spec"].get("schedulingGates"):
        # Kueue gates a pod until it has made its workload.
        return RunStatus(Stage.WAITING)
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] != "True":
        return RunStatus(Stage.ADMITTED, f"{name}: {scheduled.get('message') or scheduled.get('reason')}")
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("message"):
            return RunStatus(Stage.PULLING, f"{name}: {waiting.get('reason')}: {waiting['message']}")
    return RunStatus(Stage.PULLING)


def _in_queue(workload: Object, workloads: Iterable[Object]) -> RunStatus:
    """Status of a queued run: its queue, the number of workloads before it, and Kueue's reason for the wait."""
    queue = workload["spec"].get("queueName")
    others = [other for other in workloads if other["spec"].get("queueName") == queue and _is_waiting(other)]
    reserved = condition_of(workload, "QuotaReserved") or {}
    evicted = condition_of(workload, "Evicted") or {}
    message = reserved.get("message", "")
    if is_hopeless(workload):
        message = f"no quota is large enough, so it waits for ever; cancel it and ask for less ({message})"
    if evicted.get("status") == "True":
        message = f"{evicted.get('reason', 'Evicted')}: {evicted.get('message', '')}"
    if is_given_up(workload):
        message += "; Kueue has given it up, so it waits for ever: cancel it, and submit it again when that is mended"
    return RunStatus(Stage.WAITING, message, queue, sum(_turn(other) < _turn(workload) for other in others))


def is_hopeless(workload: Object) -> bool:
    """Whether a waiting workload can never be admitted: no flavor's whole quota is large enough, as Kueue says, or it
    has given the workload up.
    """
    message = (condition_of(workload, "QuotaReserved") or {}).get("message", "")
    return _is_waiting(workload) and (is_given_up(workload) or (_NEVER in message and _LATER not in message))


def is_given_up(workload: Object) -> bool:
    """Whether Kueue has taken a workload out of its queue for good. One that somebody has taken out is not meant."""
    return workload["spec"].get("active") is False and _evicted(workload).startswith(_GIVEN_UP)


def is_over_time(workload: Object) -> bool:
    """Whether Kueue has given a workload up because it held its machines for too long."""
    return is_given_up(workload) and _evicted(workload) == _OVER_TIME


def _evicted(workload: Object) -> str:
    return str((condition_of(workload, "Evicted") or {}).get("reason", ""))


def waits_since(workload: Object) -> datetime:
    """Since when a waiting workload waits: since it was made, or lost its quota."""
    since = (condition_of(workload, "QuotaReserved") or {}).get("lastTransitionTime")
    return datetime.fromisoformat(since or workload["metadata"]["creationTimestamp"])


def _turn(workload: Object) -> tuple[int, str, str]:
    """Kueue's order of a queue: priority, then age."""
    metadata = workload["metadata"]
    return -int(workload["spec"].get("priority") or 0), metadata["creationTimestamp"], metadata["name"]


def is_of(workload: Object, mine: set[str]) -> bool:
    """Whether an object with one of these uids owns a workload."""
    return any(owner["uid"] in mine for owner in workload["metadata"].get("ownerReferences", []))


def _is_waiting(workload: Object) -> bool:
    return not is_true(workload, "Finished") and not is_true(workload, "Admitted")


def event_of(item: Mapping[str, Any]) -> Event:
    """An event that Kubernetes recorded."""
    its = item["involvedObject"]
    about = f"{its.get('kind', '').lower()}/{its.get('name', '')}"
    kind: Literal["normal", "warning"] = "warning" if item.get("type") == "Warning" else "normal"
    return Event(
        seconds_of(time_of(item)),
        item.get("reason") or "",
        item.get("message") or "",
        kind,
        about,
    )


def time_of(event: Mapping[str, Any]) -> str:
    """When an event was recorded last."""
    # Kueue and the scheduler write events of the newer kind, which have no lastTimestamp.
    last = event.get("lastTimestamp") or (event.get("series") or {}).get("lastObservedTime")
    return str(last or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def seconds_of(stamp: str) -> float:
    """A time of Kubernetes in seconds since the epoch."""
    return datetime.fromisoformat(stamp).timestamp()
