"""Runs as executions of a Flyte workflow. Flyte starts and ends them; Kubernetes shows what they are doing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flyteidl.admin.execution_pb2 import Execution

from strata_platform import progress_line
from strata_platform.backends import cold_start
from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.backend import Pause, already_runs, destinations, execution_name, find_gpu, parse_points
from strata_platform.backends.flyte_admin import FlyteAdmin
from strata_platform.backends.flyte_config import FlyteConfig
from strata_platform.backends.flyte_messages import (
    LIVE,
    NAME,
    OWNER,
    created,
    events_of,
    held_by,
    is_on_gpus,
    message_of,
    owner_of,
    phase_of,
    run_name,
    spec_inputs,
    spec_values,
    started,
)
from strata_platform.backends.flyte_registration import Registration
from strata_platform.backends.flyte_store import FlyteStore
from strata_platform.backends.kept_logs import KeptLogs, RunAddress, kept_lines
from strata_platform.backends.kubernetes_objects import Namespace, require_admission, shape_of
from strata_platform.backends.pod_logs import PodLogs
from strata_platform.backends.pod_progress import PodProgress, with_record, with_status
from strata_platform.errors import BackendError, NotReady, Refused, RunExists, RunNotFound, StrataError, Unreachable
from strata_platform.estimate.gpus import Gpu
from strata_platform.owner import this_user
from strata_platform.pod_settings import require_flytes_gpus
from strata_platform.run_layout import METRICS
from strata_platform.runs import Event, Held, LogLine, MetricPoint, Outputs, Phase, Run

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

log = logging.getLogger(__name__)

SUBMISSION = "strata/submission"
"""Annotation of an execution: which call of `submit` made it, to know one's own after a lost answer."""


class FlyteBackend:
    """Runs on the cluster of the Flyte configuration file `config`, by default the one that pyflyte and flytectl read.

    A run is the newest of its executions: `NAME`, `NAME-x2` for its second submission, and so on, and those that
    Flyte's console relaunched. `submit` starts the release of the workflow; `version` names another registration, and
    `image` registers the workflow of the folder `source` to run in that image. Stages, logs and events come from the
    Kubernetes of KUBECONFIG and `context`; without it a run only has phases.
    """

    name = "flyte"

    def __init__(
        self,
        project: str = "flytesnacks",
        domain: str = "development",
        *,
        config: str | None = None,
        context: str | None = None,
        image: str | None = None,
        version: str | None = None,
        source: Path = Path(),
    ) -> None:
        self._config = FlyteConfig.read(config)
        self._admin = FlyteAdmin(self._config, project, domain)
        self._store = FlyteStore(self._config)
        self._registration = Registration(self._admin, image=image, version=version, source=source)
        self._where, self._context = f"{project}-{domain}", context
        self._namespace: Namespace | None = None
        self._progress = PodProgress()
        self._newest_of: dict[str, Execution] = {}
        self._looked: tuple[float, float] = (inf, -inf)

    def gpu(self, resources: Resources) -> Gpu | None:
        """The GPU model that `resources.gpu_type` names."""
        return find_gpu(resources.gpu_type or "a GPU without resources.gpu_type") if resources.gpu else None

    def require_admission(self, resources: Resources, topology: Topology) -> None:
        """Raises BackendError if the tenant's queues can never admit the run. Warns if that is not known."""
        require_admission(self._kubernetes, resources, topology)

    def me(self) -> str:
        """Who this process belongs to, or STRATA_OWNER."""
        return this_user()

    def finished(self, spec: RunSpec) -> None:
        """The run is started: its first task compares the data as well, and starts no other."""

    def submit(self, spec: RunSpec) -> Run:
        """Start an execution of the workflow.

        Flyte decides which of two submissions at once has the name: the other one gets RunExists.
        """
        try:
            require_flytes_gpus(spec.resources)
        except ValueError as error:
            raise BackendError(str(error), status=422, reason="Invalid") from error
        plan = self._registration.launch_plan()
        mine = uuid4().hex
        labels = {NAME: spec.name, OWNER: this_user()}
        while True:
            # One look finds what has not ended and the name that is free: whoever submits meanwhile takes that name.
            found, name = self._look(spec.name)
            for execution in self._live(spec.name, found):
                raise self._exists(execution)
            try:
                with translated_errors(f"to submit {spec.name}"):
                    self._admin.create(name, plan, spec_inputs(spec), labels, {SUBMISSION: mine})
            except BackendError as error:
                known = error.reason == "ALREADY_EXISTS"
                # Of two at once, Flyte may notice the second one by its object in Kubernetes, as an internal error.
                if not known and "already exists" not in str(error):
                    raise
                # Another run's, somebody else's submission of this one, or this call's own after a lost answer.
                taken = self._fetch(name)
                if not known or taken.spec.annotations.values.get(SUBMISSION) != mine:
                    if run_name(taken) == spec.name:
                        raise self._exists(taken) from error
                    continue
            return self._run(self._fetch(name))

    def _exists(self, execution: Execution) -> RunExists:
        by = owner_of(execution)
        state = "was submitted at the same moment" if phase_of(execution).is_end else "has not ended"
        return already_runs(run_name(execution), state, f"as execution {execution.id.name}{f' of {by}' if by else ''}")

    def get(self, name: str) -> Run:
        """The newest execution of this name, with what its pods report."""
        return self._detailed(self._newest(name))

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """The logs of the pods that exist, and what is kept of those that are gone; with `pause` also of later pods.

        A `name` with a slash is the address of a run's folder: its kept logs.
        """
        if (lines := kept_lines(name, pause, self._store.open)) is not None:
            return lines
        execution = self._newest(name)
        kept = KeptLogs(self._address_of(execution), self._store.open)
        if (
            phase_of(execution).is_end
            and not kept.files.names
            and not any(map(shape_of, self._kubernetes().pods(execution.id.name)))
        ):
            log.warning("the training pods of %s are removed, with their logs, %s", name, kept.why_none)
        return (line for line in self._lines(execution, pause, kept) if progress_line.decode(line.text) is None)

    def _lines(self, execution: Execution, pause: Pause | None, kept: KeptLogs | None = None) -> Iterator[LogLine]:
        pods = PodLogs(self._kubernetes(), execution.id.name, kept)
        return pods.so_far() if pause is None else pods.follow(lambda: self._is_over(execution), pause)

    def _address_of(self, execution: Execution) -> RunAddress | None:
        """Where the folder of the execution's run is; None for an execution of another workflow."""
        with translated_errors(f"to read the inputs of {execution.id.name}"):
            return RunAddress.of(spec_values(self._admin.inputs(execution.id.name)))

    def _is_over(self, execution: Execution) -> bool:
        return phase_of(self._fetch(execution.id.name)).is_end

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points that the training pods report; for a run that succeeded, those of its metrics file."""
        execution = self._newest(name)
        if phase_of(execution) is Phase.SUCCEEDED:
            # A finished run that was submitted again trained in an execution before.
            for each in (execution, *reversed(self._look(name)[0])):
                if file := self._metrics_file(each):
                    return parse_points(map(json.loads, file.splitlines()))
        values = (progress_line.decode(line.text) or {} for line in self._lines(execution, pause))
        return parse_points(value["point"] for value in values if "point" in value)

    def _metrics_file(self, execution: Execution) -> str:
        """The text of the metrics file among the training task's outputs; empty if there is no such task."""
        with translated_errors(f"to read the metrics of {execution.id.name}"):
            for outputs in self._admin.inner_outputs(execution.id.name):
                if "weights" in outputs:
                    return self._store.read(f"{outputs['weights'].rstrip('/')}/{METRICS}").decode()
        return ""

    def events(self, name: str) -> list[Event]:
        """Flyte's phases of the execution, what Kubernetes and Kueue recorded, and where its start went."""
        execution = self._newest(name)
        found = events_of(execution)
        found += cold_start.recorded_events(self._kubernetes(), execution.id.name)
        if phase_of(execution) is Phase.SUCCEEDED:
            try:
                found += cold_start.of_record(self._record(execution), found)
            except BackendError as error:
                log.warning("cannot read how long the phases of the start took: %s", error)
        return sorted(found, key=lambda event: event.time)

    def cancel(self, name: str) -> None:
        """Terminate every execution of the run that has not ended. Their pods have their grace period to end."""
        self._newest(name)
        with translated_errors(f"to cancel {name}"):
            for execution in self._live(name, self._look(name)[0]):
                self._admin.terminate(execution.id.name, "canceled with strata")

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Addresses of the execution's outputs in the object store."""
        execution = self._newest(name)
        phase = phase_of(execution)
        if phase is not Phase.SUCCEEDED:
            raise NotReady(f"{name} is {phase}: outputs exist once a run has succeeded")
        with translated_errors(f"to read the outputs of {name}"):
            found = self._output_uris(execution)
            if to is not None:
                for kind, copy in destinations(to).items():
                    self._store.copy(found[kind], copy, folder=kind == "model")
                    found[kind] = str(copy)
        return Outputs(**found)

    def _look(self, name: str) -> tuple[list[Execution], str]:
        """The executions that `submit` started for a run, the oldest first, and the name of the next one."""
        found: list[Execution] = []
        for number in count(1):
            execution = self._find(execution_name(name, number))
            if execution is None:
                return found, execution_name(name, number)
            # Another run may have taken the name of the next execution.
            if number == 1 or run_name(execution) == name:
                found.append(execution)
        raise AssertionError

    def _live(self, name: str, submitted: Sequence[Execution]) -> list[Execution]:
        """The executions of a run that have not ended, whoever started them; the newest first."""
        with translated_errors(f"to look for {name}"):
            found = {execution.id.name: execution for execution in self._admin.executions(filters=LIVE)}
        found |= {execution.id.name: execution for execution in submitted}
        mine = [each for each in found.values() if run_name(each) == name and not phase_of(each).is_end]
        return sorted(mine, key=created, reverse=True)

    def _newest(self, name: str) -> Execution:
        """The newest execution of a run, as `list` shows it. Raises RunNotFound."""
        found = self._look(name)[0]
        if not found:
            raise RunNotFound(f"no run was submitted to {self._where} as {name!r}; 'strata list' shows all")
        self._look_for_relaunched(since=created(found[-1]))
        known = self._newest_of.get(name)
        if known is not None and created(known) > created(found[-1]):
            return self._fetch(known.id.name)
        return found[-1]

    def _look_for_relaunched(self, since: float) -> None:
        """Remember the newest execution of each run among those made after `since`. A second look reads what is new."""
        oldest, newest = self._looked
        until = newest if oldest <= since else since
        with translated_errors("to list runs"):
            for execution in self._admin.executions():
                newest = max(newest, created(execution))
                if created(execution) <= until:
                    break
                name = run_name(execution)
                if name not in self._newest_of or created(execution) > created(self._newest_of[name]):
                    self._newest_of[name] = execution
        self._looked = (min(oldest, since), newest)

    def _find(self, name: str) -> Execution | None:
        try:
            return self._fetch(name)
        except RunNotFound:
            return None

    def _fetch(self, name: str) -> Execution:
        with translated_errors(f"to look for {name}"):
            return self._admin.execution(name)

    def _kubernetes(self) -> Namespace:
        if self._namespace is None:
            self._namespace = Namespace(self._where, self._context)
        return self._namespace

    def _run(self, execution: Execution) -> Run:
        """The run as Flyte reports it."""
        phase, began = phase_of(execution), started(execution)
        seconds = execution.closure.duration.ToNanoseconds() / 1e9
        identifier = execution.id
        console = f"{self._config.console_url}/console/projects/{identifier.project}/domains/{identifier.domain}"
        return Run(
            name=run_name(execution),
            backend=self.name,
            phase=phase,
            message=message_of(execution),
            submitted=created(execution) or None,
            started=began,
            ended=began + seconds if phase.is_end and began is not None else None,
            owner=owner_of(execution),
            where=f"{console}/executions/{identifier.name}",
        )

    def _detailed(self, execution: Execution) -> Run:
        """The run with its stage and progress, from its pods, its training processes and its record."""
        run = self._run(execution)
        if run.is_done:
            return self._with_record(run, execution) if run.phase is Phase.SUCCEEDED else run
        try:
            namespace = self._kubernetes()
            pods = namespace.pods(execution.id.name)
            status = namespace.status(execution.id.name, pods)
            return self._progress.read(with_status(run, status), namespace, pods, execution.id.name)
        except BackendError as error:
            # Without rights to Kubernetes, or while the node of rank 0 does not answer, Flyte's phase remains.
            return replace(run, message="; ".join(filter(None, (run.message, str(error)))))

    def _with_record(self, run: Run, execution: Execution) -> Run:
        try:
            record = self._record(execution)
        except BackendError as error:
            # The run succeeded, whether or not this machine can reach the object store.
            return replace(run, message=str(error))
        return with_record(run, record)

    def _record(self, execution: Execution) -> dict[str, Any]:
        """The completion record among the outputs of an execution that succeeded."""
        with translated_errors(f"to read the record of {run_name(execution)}"):
            found: dict[str, Any] = json.loads(self._store.read(self._output_uris(execution)["record"]))
        return found

    def _output_uris(self, execution: Execution) -> dict[str, str]:
        """Addresses of the outputs of an execution that succeeded."""
        found = self._admin.outputs(execution.id.name)
        kinds = ("model", "report", "record")
        if missing := [kind for kind in kinds if kind not in found]:
            raise BackendError(
                f"the workflow of execution {execution.id.name} has no outputs {', '.join(missing)}; it has "
                f"{', '.join(sorted(found)) or 'none'}",
                status=404,
                reason="NotFound",
            )
        return {kind: found[kind] for kind in kinds}

    def held(self, since: float) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """Every attempt of training and evaluation that Flyte has a record of, with the GPUs of its spec."""
        with translated_errors("to list runs"):
            for execution in self._admin.executions():
                if created(execution) < since:
                    return
                run = self._run(execution)
                try:
                    yield run, self._held_by(run, execution.id.name)
                except (Refused, Unreachable):
                    raise
                except StrataError as error:
                    # A rule of the store may have removed the inputs.
                    log.warning("the GPU hours of %s are unknown: %s", run.name, error)
                    yield run, None

    def _held_by(self, run: Run, execution: str) -> list[Held]:
        found: list[Held] = []
        # Of the attempts of a task, which have the same inputs, those are read once.
        asked: dict[str, Any] = {}
        with translated_errors(f"to read what {execution} held"):
            for attempt in self._admin.task_executions(execution):
                if not is_on_gpus(attempt):
                    continue
                node = attempt.id.node_execution_id.node_id
                if node not in asked:
                    asked[node] = spec_values(self._admin.task_inputs(attempt.id))
                if held := held_by(attempt, asked[node], run.ended or time.time()):
                    found.append(held)
        return found

    def list(self, limit: int | None, owner: str | None) -> list[Run]:
        """The newest runs, each as its newest execution, with the stage of those that have not ended."""
        newest: dict[str, Execution] = {}
        with translated_errors("to list runs"):
            for execution in self._admin.executions():
                newest.setdefault(run_name(execution), execution)
                mine = [each for each in newest.values() if owner is None or owner_of(each) == owner]
                if limit is not None and len(mine) >= limit:
                    break
        runs = [self._run(each) for each in newest.values() if owner is None or owner_of(each) == owner]
        live = {run.name: newest[run.name].id.name for run in runs if not run.is_done}
        if not live:
            return runs
        try:
            statuses = self._kubernetes().statuses(live.values())
        except BackendError as error:
            log.warning("cannot read which runs are waiting: %s", error)
            return runs
        return [with_status(run, statuses[live[run.name]]) if run.name in live else run for run in runs]
