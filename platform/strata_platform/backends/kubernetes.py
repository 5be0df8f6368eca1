"""Runs as JobSets. Kubernetes, JobSet's controller and Kueue start, repeat and end them; no other server is needed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from strata_platform import progress_line
from strata_platform.backends import cold_start
from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.backend import Pause, already_runs, destinations, find_gpu, parse_points
from strata_platform.backends.job_set import (
    CANCELED,
    CAUSE,
    NAME,
    OWNER,
    SUBMISSION,
    job_set,
    object_name,
    spec_of,
    submission_order,
    text_of_spec,
)
from strata_platform.backends.job_set_state import end_of, has_succeeded, held_by, may_be_given_up, record_of
from strata_platform.backends.kept_logs import KeptLogs, RunAddress, kept_lines
from strata_platform.backends.kubernetes_objects import (
    JOB_SET,
    WORKLOADS,
    Namespace,
    RunStatus,
    index_of,
    is_of,
    labels_of,
    require_admission,
    seconds_of,
)
from strata_platform.backends.pod_logs import PodLogs
from strata_platform.backends.pod_progress import PodProgress, with_record, with_status
from strata_platform.errors import BackendError, NotReady, RunExists, RunNotFound, SpecError
from strata_platform.estimate.gpus import Gpu
from strata_platform.kubernetes_api import ApiError, Object
from strata_platform.owner import owner_of_account, this_user
from strata_platform.pod_settings import QUEUE, check_pods, gpu_resource
from strata_platform.run_layout import RunLayout
from strata_platform.runs import Event, Held, LogLine, MetricPoint, Outputs, Phase, Run, Stage

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

log = logging.getLogger(__name__)

POD_TEMPLATE = "strata"
"""The pod template of runs without `resources.pod_template`."""
IMAGE = "strata/image"
"""Annotation of a pod template: the image of runs without one."""

# Accounts of programs, which may submit for a person. The chart's policy of owners says the same.
_SHARED, _OWNER = "system:serviceaccount:", "STRATA_OWNER"
# Seconds for Kueue to notice a new JobSet.
_NOTICE_SECONDS = 20.0


class KubernetesBackend:
    """Runs in a namespace of the cluster of KUBECONFIG and `context`.

    A run is the newest of its JobSets: `NAME`, `NAME-x2` for its second submission, and so on. Pods run `image`, by
    default the one that the chart names.
    """

    name = "kubernetes"

    def __init__(self, namespace: str, *, context: str | None = None, image: str | None = None) -> None:
        self._where, self._context, self._image = namespace, context, image
        self._progress = PodProgress()
        self._known: Namespace | None = None

    def _namespace(self) -> Namespace:
        if self._known is None:
            self._known = Namespace(self._where, self._context, JOB_SET)
        return self._known

    def gpu(self, resources: Resources) -> Gpu | None:
        """The GPU model that `resources.gpu_type` names."""
        return find_gpu(resources.gpu_type or "a GPU without resources.gpu_type") if resources.gpu else None

    def require_admission(self, resources: Resources, topology: Topology) -> None:
        """Raises BackendError if the tenant's queues can never admit the run. Warns if that is not known."""
        named = {"gpu_resource": gpu_resource(resources)} if resources.gpu else {}
        require_admission(self._namespace, resources.model_copy(update=named), topology)

    def me(self) -> str:
        """The account that Kubernetes knows this client by. One that many share may name a person in STRATA_OWNER."""
        with translated_errors("to say who you are"):
            try:
                username = self._namespace().api.account()
            except ApiError as error:
                log.warning("cannot read your account from Kubernetes, so your user name here is the owner: %s", error)
                return this_user()
        if username.startswith(_SHARED) and _OWNER in os.environ:
            return this_user()
        if (own := owner_of_account(username)) != os.environ.get(_OWNER, own):
            log.warning("%s is ignored: the runs' owner is %s, your account in Kubernetes", _OWNER, own)
        return own

    def finished(self, spec: RunSpec) -> Run | None:
        """The newest JobSet of the run, if it has succeeded with this spec. Its pods would train no step."""
        with translated_errors(f"to look for {spec.name}"):
            found = self._look(spec.name)[0]
        if not found or (run := self._run(found[-1])).phase is not Phase.SUCCEEDED:
            return None
        try:
            same = spec_of(found[-1]) == spec
        except SpecError:
            # Another version wrote it.
            return None
        return run if same else None

    def submit(self, spec: RunSpec) -> Run:
        """Create a JobSet.

        The API server decides which of two submissions at once has the name: the other one gets RunExists.
        """
        try:
            for warning in check_pods(spec.output, spec.resources, spec.topology):
                log.warning("%s", warning)
        except ValueError as error:
            raise BackendError(str(error), status=422, reason="Invalid") from error
        template, image = self._template(spec.resources.pod_template or POD_TEMPLATE)
        mine, owner = uuid4().hex, self.me()
        while True:
            found, name = self._look(spec.name)
            for each in found:
                if not (run := self._run(each)).is_done:
                    raise _exists(each, run)
            try:
                body = job_set(name, spec, template, image, owner, mine)
            except ValueError as error:
                where = spec.resources.pod_template or POD_TEMPLATE
                raise BackendError(f"pod template {where!r}: {error}", status=422, reason="Invalid") from error
            try:
                with translated_errors(f"to submit {spec.name}"):
                    self._send("POST", "", body)
            except RunNotFound as error:
                kind = "/".join(JOB_SET.jobs[:2])
                raise BackendError(
                    f"the cluster has no JobSets of {kind}; install JobSet, as docs/backends.md says", status=404
                ) from error
            except BackendError as error:
                if error.status != 409:
                    raise
                # Another run's, somebody else's submission of this one, or this call's own after a lost answer.
                taken = self._fetch(name)
                if taken["metadata"].get("annotations", {}).get(SUBMISSION) != mine:
                    if labels_of(taken).get(NAME) == spec.name:
                        raise _exists(taken, self._run(taken)) from error
                    continue
            return self._run(self._fetch(name))

    def _template(self, name: str) -> tuple[Object, str]:
        """A pod template of the namespace, and the image of the run."""
        with translated_errors(f"to read the pod template {name}"):
            try:
                found = self._namespace().api.get(f"{self._namespace().core}/podtemplates/{name}")
            except ApiError as error:
                if error.status != 404:
                    raise
                raise BackendError(
                    f"there is no pod template {name!r} in the namespace {self._where}; the chart makes those of its "
                    "tenants: name one in resources.pod_template, or set STRATA_PROJECT and STRATA_DOMAIN",
                    status=404,
                    reason="NotFound",
                ) from error
        image = self._image or found["metadata"].get("annotations", {}).get(IMAGE)
        if image is None:
            raise BackendError(f"pod template {name!r} names no image; give one with --image", status=422)
        return found["template"], image

    def _send(self, method: str, path: str, body: Object) -> None:
        group, version, plural = JOB_SET.jobs
        namespace = self._namespace()
        address = f"/apis/{group}/{version}/namespaces/{self._where}/{plural}{path}"
        # A field that this version of JobSet does not know is an error, and not left out.
        namespace.api.request(method, address, body, fieldValidation="Strict")

    def _fetch(self, name: str) -> Object:
        group, version, plural = JOB_SET.jobs
        with translated_errors(f"to look for {name}"):
            return self._namespace().api.get(f"/apis/{group}/{version}/namespaces/{self._where}/{plural}/{name}")

    def _look(self, run: str) -> tuple[list[Object], str]:
        """The JobSets of a run, the oldest first, and the name of the next one."""
        # Another run, or somebody else's JobSet, may have taken the name of the next one.
        everything = self._namespace().list(JOB_SET.jobs)
        taken = {each["metadata"]["name"] for each in everything}
        mine = sorted((each for each in everything if labels_of(each).get(NAME) == run), key=submission_order)
        return mine, next(name for number in count(1) if (name := object_name(run, number)) not in taken)

    def _newest(self, run: str) -> Object:
        """The newest JobSet of a run. Raises RunNotFound."""
        with translated_errors(f"to look for {run}"):
            found = self._namespace().list(JOB_SET.jobs, f"{NAME}={run}")
        if not found:
            raise RunNotFound(f"no run was submitted to {self._where} as {run!r}; 'strata list' shows all")
        return max(found, key=submission_order)

    def get(self, name: str) -> Run:
        """The newest JobSet of this name, with what its pods report."""
        return self._detailed(self._newest(name))

    def _runs(self, jobs: Sequence[Object]) -> list[Run]:
        """The runs as their JobSets show them. The workloads of those that are suspended are listed once."""
        workloads = self._namespace().list(WORKLOADS) if any(map(may_be_given_up, jobs)) else ()
        return [self._run(job, workloads=workloads) for job in jobs]

    def _run(self, job: Object, pods: Sequence[Object] | None = None, workloads: Sequence[Object] | None = None) -> Run:
        """The run as its JobSet shows it. `pods`, `workloads`: its own, and the namespace's, if they are known."""
        name = job["metadata"]["name"]
        phase, message, ended = end_of(job, self._namespace(), pods, workloads)
        begun = [pod["status"]["startTime"] for pod in pods or () if "startTime" in pod["status"]]
        return Run(
            name=labels_of(job)[NAME],
            backend=self.name,
            phase=phase,
            message=message,
            submitted=seconds_of(job["metadata"]["creationTimestamp"]),
            started=min(map(seconds_of, begun), default=None),
            ended=ended,
            restarts=(job.get("status") or {}).get("restarts", 0),
            owner=labels_of(job).get(OWNER, ""),
            where=f"{self._where}/jobsets/{name}",
        )

    def _detailed(self, job: Object) -> Run:
        """The run with its stage and progress, from its pods, its training processes and its record."""
        namespace, name = self._namespace(), job["metadata"]["name"]
        pods = namespace.pods(name)
        run = self._run(job, pods)
        if run.phase is Phase.SUCCEEDED:
            try:
                record = record_of(namespace, pods)
            except BackendError as error:
                # It has succeeded, whether or not the node of rank 0 still answers.
                return replace(run, message=str(error))
            return run if record is None else with_record(run, record)
        if run.is_done:
            return run
        shown = with_status(run, namespace.status(name, pods))
        if shown.stage is Stage.STARTING and any(index_of(pod) == 0 and has_succeeded(pod) for pod in pods):
            # JobSet's controller has yet to notice.
            shown = replace(shown, stage=Stage.EXPORTING)
        shown = replace(shown, message=shown.message or run.message)
        try:
            return self._progress.read(shown, namespace, pods, name)
        except BackendError as error:
            # While the node of rank 0 does not answer, what the objects show remains.
            return replace(shown, message="; ".join(filter(None, (shown.message, str(error)))))

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """The logs of the pods that exist, and what is kept of those that are gone; with `pause` also of later pods.

        A `name` with a slash is the address of a run's folder: its kept logs, whether or not the JobSet still exists.
        """
        if (lines := kept_lines(name, pause)) is not None:
            return lines
        job = self._newest(name)
        kept = KeptLogs(RunAddress.of(json.loads(text_of_spec(job))))
        if self._run(job).is_done and not kept.files.names and not self._namespace().pods(job["metadata"]["name"]):
            log.warning("the pods of %s are removed, with their logs, %s", name, kept.why_none)
        return (line for line in self._lines(job, pause, kept) if progress_line.decode(line.text) is None)

    def _lines(self, job: Object, pause: Pause | None, kept: KeptLogs | None = None) -> Iterator[LogLine]:
        name = job["metadata"]["name"]
        pods = PodLogs(self._namespace(), name, kept)
        return pods.so_far() if pause is None else pods.follow(lambda: self._is_over(name), pause)

    def _is_over(self, name: str) -> bool:
        return self._run(self._fetch(name)).is_done

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points that the pods report, as far as they still exist."""
        values = (progress_line.decode(line.text) or {} for line in self._lines(self._newest(name), pause))
        return parse_points(value["point"] for value in values if "point" in value)

    def events(self, name: str) -> list[Event]:
        """The submission and the end, what Kubernetes, JobSet and Kueue recorded, and where the time of the start went.

        Of the start, what the processes measured is known from a run that succeeded, while the pod of rank 0 exists.
        """
        job = self._newest(name)
        run = self._run(job)
        by = f" of {run.owner}" if run.owner else ""
        found = [Event(run.submitted or 0.0, "Submitted", f"as {run.where}{by}")]
        if run.ended is not None:
            kind = "normal" if run.phase is Phase.SUCCEEDED else "warning"
            found.append(Event(run.ended, run.phase.value.capitalize(), run.message, kind))  # type: ignore[arg-type]
        found += cold_start.recorded_events(self._namespace(), job["metadata"]["name"])
        if run.phase is Phase.SUCCEEDED:
            try:
                record = record_of(self._namespace(), self._namespace().pods(job["metadata"]["name"]))
                found += cold_start.of_record(record or {}, found)
            except BackendError as error:
                log.warning("cannot read how long the phases of the start took: %s", error)
        return sorted(found, key=lambda event: event.time)

    def cancel(self, name: str) -> None:
        """Suspend the JobSets of the run that have not ended, for good. Their pods have their grace period to end."""
        self._newest(name)
        for job in self._look(name)[0]:
            if not self._run(job).is_done:
                self._cancel(job, {})

    def hopeless(self, before: datetime) -> dict[str, Object]:
        """Workloads of JobSets that wait since `before` or longer and can never be admitted, by JobSet."""
        found = self._namespace().hopeless(before)
        return {name: workload for name, workload in found.items() if self._waits(name)}

    def _waits(self, name: str) -> bool:
        """Whether the JobSet `name` has not ended. One that was removed meanwhile has."""
        try:
            return not self._run(self._fetch(name)).is_done
        except RunNotFound:
            return False

    def end(self, name: str, cause: str) -> None:
        """Suspend the JobSet `name` for good, and tell this cause of it."""
        self._cancel(self._fetch(name), {CAUSE: cause})

    def _cancel(self, job: Object, more: Mapping[str, str]) -> None:
        """Where Kueue holds a JobSet back and lets it go, it has to be told; it would resume what only is suspended."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        with translated_errors(f"to cancel {name}"):
            self._send("PATCH", f"/{name}", {"metadata": {"annotations": {CANCELED: str(time.time()), **more}}})
            end = time.monotonic() + (_NOTICE_SECONDS if QUEUE in labels_of(job) else 0.0)
            while True:
                group, version, plural = WORKLOADS
                mine = [each for each in self._namespace().list(WORKLOADS) if is_of(each, {uid})]
                for workload in mine:
                    path = f"/apis/{group}/{version}/namespaces/{self._where}/{plural}/{workload['metadata']['name']}"
                    self._namespace().api.request("PATCH", path, {"spec": {"active": False}})
                if mine:
                    return
                if time.monotonic() > end:
                    self._send("PATCH", f"/{name}", {"spec": {"suspend": True}})
                    return
                time.sleep(0.5)

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Paths in the run's folder, as its pods see it."""
        job = self._newest(name)
        run = self._run(job)
        if run.phase is not Phase.SUCCEEDED:
            raise NotReady(f"{name} is {run.phase}: outputs exist once a run has succeeded")
        spec = spec_of(job)
        found = RunLayout(Path(spec.output) / spec.name).outputs
        if to is not None:
            if missing := [str(path) for path in found.values() if not path.exists()]:
                raise NotReady(
                    f"{', '.join(missing)}: these paths are on a volume of the cluster, which this machine does not "
                    "mount; mount it at the same path, or set export.url in the spec to copy the model to a store",
                    status=410,
                )
            for kind, target in destinations(to).items():
                copy = shutil.copytree if found[kind].is_dir() else shutil.copy2
                found[kind] = Path(copy(found[kind], target))
        return Outputs(**{kind: str(path) for kind, path in found.items()})

    def held(self, since: float) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """The time for which Kueue admitted each JobSet that exists; without a queue, from its creation to its end."""
        jobs = sorted(self._namespace().list(JOB_SET.jobs, NAME), key=submission_order, reverse=True)
        workloads = self._namespace().list(WORKLOADS)
        for job in jobs:
            run = self._run(job, workloads=workloads)
            if (run.submitted or 0.0) < since:
                return
            yield run, held_by(job, run, workloads)

    def list(self, limit: int | None, owner: str | None) -> list[Run]:
        """The newest runs, each as its newest JobSet, with the stage of those that have not ended."""
        jobs = [job for job in self._newest_of_each().values() if owner in (None, labels_of(job).get(OWNER, ""))]
        jobs = jobs[:limit]
        runs = self._runs(jobs)
        names = {run.name: job["metadata"]["name"] for run, job in zip(runs, jobs, strict=True) if not run.is_done}
        statuses: Mapping[str, RunStatus] = self._namespace().statuses(names.values()) if names else {}
        return [with_status(run, statuses[names[run.name]]) if run.name in names else run for run in runs]

    def _newest_of_each(self) -> dict[str, Object]:
        """The newest JobSet of each run, the newest run first."""
        newest: dict[str, Object] = {}
        for job in sorted(self._namespace().list(JOB_SET.jobs, NAME), key=submission_order, reverse=True):
            newest.setdefault(labels_of(job)[NAME], job)
        return newest


def _exists(job: Object, run: Run) -> RunExists:
    state = "was submitted at the same moment" if run.is_done else "has not ended"
    by = f" of {run.owner}" if run.owner else ""
    return already_runs(run.name, state, f"as JobSet {job['metadata']['name']}{by}")
