"""Runs as executions of a Flyte workflow. FlyteRemote starts and ends them; Kubernetes shows what they are doing."""

from __future__ import annotations

import configparser
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from flytekit.configuration import Config
from flytekit.exceptions.user import FlyteEntityNotExistException
from flytekit.models.common import Labels
from flytekit.models.core.execution import WorkflowExecutionPhase as FlytePhase
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.models.execution import Execution
from flytekit.remote import FlyteRemote
from flytekit.remote.executions import FlyteWorkflowExecution
from flytekit.tools.translator import Options
from kubernetes import client

from strata_platform import progress_line
from strata_platform.backends.api_errors import translated_errors
from strata_platform.backends.backend import Pause, destinations, eval_loss, find_gpu, parse_points, with_progress
from strata_platform.backends.kubernetes_objects import Namespace, shape_of
from strata_platform.backends.pod_logs import PodLogs, line_of, main_pods, read_log
from strata_platform.errors import BackendError, NotReady, RunExists, RunNotFound
from strata_platform.estimate import Gpu
from strata_platform.run_layout import METRICS, RunLayout
from strata_platform.runs import Event, LogLine, MetricPoint, Outputs, Phase, Run, Stage
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Resources

log = logging.getLogger(__name__)

WORKFLOW = "workflows.finetune.finetune"
NAME = "strata/run"
"""Label of an execution that holds the name of its run."""

PHASES = {
    FlytePhase.UNDEFINED: Phase.QUEUED,
    FlytePhase.QUEUED: Phase.QUEUED,
    FlytePhase.RUNNING: Phase.RUNNING,
    FlytePhase.SUCCEEDING: Phase.RUNNING,
    FlytePhase.FAILING: Phase.RUNNING,
    FlytePhase.ABORTING: Phase.RUNNING,
    FlytePhase.SUCCEEDED: Phase.SUCCEEDED,
    FlytePhase.FAILED: Phase.FAILED,
    FlytePhase.TIMED_OUT: Phase.FAILED,
    FlytePhase.ABORTED: Phase.ABORTED,
}


class FlyteBackend:
    """Runs on the cluster of the Flyte configuration file `config`, by default the one that pyflyte and flytectl read.

    A run is the newest of its executions: `NAME`, `NAME-x2` for its second submission, and so on. `submit` starts the
    newest registered version of the workflow; with `image` it first registers the workflow of the folder `source` to
    run in that image. Stages, logs and events come from the Kubernetes of KUBECONFIG and `context`; without it a run
    only has phases.
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
        source: Path = Path(),
    ) -> None:
        self._remote = FlyteRemote(_configuration(config), project, domain, interactive_mode_enabled=False)
        self._project, self._domain, self._config, self._context = project, domain, config, context
        self._image, self._source = image, source
        self._namespace: Namespace | None = None
        self._progress: dict[str, dict[str, Any]] = {}

    def gpu(self, resources: Resources) -> Gpu | None:
        """The GPU model that `resources.gpu_type` names."""
        return find_gpu(resources.gpu_type or "a GPU without resources.gpu_type") if resources.gpu else None

    def submit(self, spec: RunSpec) -> Run:
        """Start an execution of the workflow."""
        earlier = self._executions(spec.name)
        if earlier and not _phase(earlier[-1]).is_end:
            raise RunExists(
                f"run {spec.name!r} has not ended, as execution {earlier[-1].id.name}; follow it with 'strata logs "
                f"-f {spec.name}', end it with 'strata cancel {spec.name}', or choose another name"
            )
        version = self.register() if self._image else None
        with translated_errors(f"to submit {spec.name}"):
            try:
                workflow = self._remote.fetch_workflow(name=WORKFLOW, version=version)
            except FlyteEntityNotExistException as error:
                raise BackendError(
                    f"{WORKFLOW} is not registered in {self._project}-{self._domain}; name the image that it runs in "
                    "(--image), or register it: pyflyte register --copy all --destination-dir . --image IMAGE "
                    "workflows",
                    status=404,
                    reason="NotRegistered",
                ) from error
            execution = self._remote.execute(
                workflow,
                inputs={"spec": spec},
                type_hints={"spec": RunSpec},
                execution_name=self._free_name(spec.name),
                options=Options(labels=Labels({NAME: spec.name})),
            )
        return self._run(execution)

    def register(self) -> str:
        """Register the workflow of the source folder under a new version, and return that."""
        version = time.strftime("%Y%m%d-%H%M%S-") + f"{time.time_ns() % 10**6:06d}"
        pyflyte = [
            str(Path(sys.executable).with_name("pyflyte")),
            *(["--config", self._config] if self._config else []),
        ]
        place = ["--project", self._project, "--domain", self._domain, "--version", version]
        assert self._image is not None
        # The working directory of the image, as `pyflyte run` uses; the default of `pyflyte register` is /root.
        code = ["--copy", "all", "--destination-dir", ".", "--image", self._image, "workflows/finetune.py"]
        command = [*pyflyte, "register", *place, *code]
        if not (self._source / "workflows" / "finetune.py").is_file():
            raise BackendError(
                f"{self._source.absolute()} has no workflows/finetune.py to register; start in the project's folder, "
                "or leave out the image to take the newest version that the cluster knows"
            )
        ended = subprocess.run(command, cwd=self._source, capture_output=True, text=True)
        if ended.returncode:
            raise BackendError(f"the workflow could not be registered:\n{(ended.stdout + ended.stderr)[-2000:]}")
        return version

    def get(self, name: str) -> Run:
        """The newest execution of this name, with what its pods report."""
        return self._detailed(self._newest(name))

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """The logs of the pods that still exist; with `pause` also those of later pods."""
        execution = self._newest(name)
        if _phase(execution).is_end and not any(map(shape_of, self._kubernetes().pods(execution.id.name))):
            log.warning("the training pods of %s are removed, with their logs; the cluster may archive them", name)
        return (line for line in self._lines(execution, pause) if progress_line.decode(line.text) is None)

    def _lines(self, execution: Execution, pause: Pause | None) -> Iterator[LogLine]:
        pods = PodLogs(self._kubernetes(), execution.id.name)
        return pods.so_far() if pause is None else pods.follow(lambda: self._is_over(execution), pause)

    def _is_over(self, execution: Execution) -> bool:
        return _phase(self._fetch(execution.id.name)).is_end

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points that the training pods report; for a run that succeeded, those of its metrics file."""
        execution = self._newest(name)
        if _phase(execution) is Phase.SUCCEEDED and (file := self._metrics_file(execution)):
            return parse_points(map(json.loads, file.splitlines()))
        values = (progress_line.decode(line.text) or {} for line in self._lines(execution, pause))
        return parse_points(value["point"] for value in values if "point" in value)

    def _metrics_file(self, execution: Execution) -> str:
        """The text of the metrics file among the training task's outputs; empty if there is no such task."""
        with translated_errors(f"to read the metrics of {execution.id.name}"), tempfile.TemporaryDirectory() as folder:
            synced = self._remote.sync_execution(_promoted(execution), sync_nodes=True)
            for node in synced.node_executions.values():
                for inner in node.subworkflow_node_executions.values():
                    outputs = inner.outputs.literals if inner.is_done and not inner.error and inner.outputs else {}
                    if "weights" in outputs:
                        copy = RunLayout(Path(folder)).metrics
                        uri = outputs["weights"].scalar.blob.uri
                        self._remote.file_access.get_data(f"{uri.rstrip('/')}/{METRICS}", str(copy))
                        return copy.read_text(encoding="utf-8")
        return ""

    def events(self, name: str) -> list[Event]:
        """Flyte's phases of the execution, and the events that Kubernetes and Kueue recorded for its objects."""
        execution = self._newest(name)
        closure = execution.closure
        found = [Event(closure.created_at.timestamp(), "Submitted", f"as execution {execution.id.name}")]
        if (started := _started(execution)) is not None:
            found.append(Event(started, "Started", "Flyte began to run it"))
        phase = _phase(execution)
        if phase.is_end:
            at = closure.updated_at or closure.created_at
            good = phase is Phase.SUCCEEDED
            reason = phase.value.capitalize()
            found.append(Event(at.timestamp(), reason, _message(execution), "normal" if good else "warning"))
        found += self._kubernetes().events(execution.id.name)
        return sorted(found, key=lambda event: event.time)

    def cancel(self, name: str) -> None:
        """Terminate the execution. Flyte deletes its pods, which have their grace period to end."""
        execution = self._newest(name)
        if not _phase(execution).is_end:
            with translated_errors(f"to cancel {name}"):
                self._remote.terminate(_promoted(execution), "canceled with strata")

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Addresses of the execution's outputs in the object store."""
        execution = self._newest(name)
        phase = _phase(execution)
        if phase is not Phase.SUCCEEDED:
            raise NotReady(f"{name} is {phase}: outputs exist once a run has succeeded")
        with translated_errors(f"to read the outputs of {name}"):
            found = self._output_uris(execution)
            if to is not None:
                for kind, copy in destinations(to).items():
                    self._remote.file_access.get_data(found[kind], str(copy), is_multipart=kind == "model")
                    found[kind] = str(copy)
        return Outputs(**found)

    def _executions(self, name: str) -> list[Execution]:
        """All executions of a run, the oldest first."""
        found: list[Execution] = []
        for number in count(1):
            execution = self._find(_execution_name(name, number))
            if execution is None:
                return found
            # Another run may have taken the name of the next execution.
            if number == 1 or _name(execution) == name:
                found.append(execution)
        raise AssertionError

    def _free_name(self, name: str) -> str:
        names = (_execution_name(name, number) for number in count(1))
        return next(name for name in names if self._find(name) is None)

    def _newest(self, name: str) -> Execution:
        found = self._executions(name)
        if not found:
            raise RunNotFound(
                f"no run was submitted to {self._project}-{self._domain} as {name!r}; 'strata list' shows all"
            )
        return found[-1]

    def _find(self, name: str) -> Execution | None:
        try:
            return self._fetch(name)
        except RunNotFound:
            return None

    def _fetch(self, name: str) -> Execution:
        with translated_errors(f"to look for {name}"):
            found: Execution = self._remote.client.get_execution(
                WorkflowExecutionIdentifier(self._project, self._domain, name)
            )
        return found

    def _kubernetes(self) -> Namespace:
        if self._namespace is None:
            self._namespace = Namespace(f"{self._project}-{self._domain}", self._context)
        return self._namespace

    def _run(self, execution: Execution) -> Run:
        """The run as Flyte reports it."""
        closure, phase, started = execution.closure, _phase(execution), _started(execution)
        ended = started + closure.duration.total_seconds() if phase.is_end and started is not None else None
        return Run(
            name=_name(execution),
            backend=self.name,
            phase=phase,
            message=_message(execution),
            submitted=closure.created_at and closure.created_at.timestamp(),
            started=started,
            ended=ended,
            where=self._remote.generate_console_url(_promoted(execution)),
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
            phase = Phase.QUEUED if status.stage is Stage.WAITING else run.phase
            run = replace(
                run,
                phase=phase,
                stage=status.stage,
                message=status.message,
                queue=status.queue,
                position=status.position,
            )
            return self._with_training(run, namespace, pods, execution.id.name)
        except BackendError as error:
            # Without rights to Kubernetes, or while the node of rank 0 does not answer, Flyte's phase remains.
            return replace(run, message="; ".join(filter(None, (run.message, str(error)))))

    def _with_training(self, run: Run, namespace: Namespace, pods: Sequence[client.V1Pod], execution: str) -> Run:
        """The run with the progress that rank 0 reported; values that it reports only once are remembered."""
        known = self._progress.setdefault(execution, {})
        last: list[MetricPoint] = []
        for pod in main_pods(pods):
            seen = known.get("pod") == pod.metadata.uid
            if not seen:
                known |= {"pod": pod.metadata.uid, "stage": Stage.STARTING}
            with translated_errors(f"to read the log of {pod.metadata.name}"):
                raws = read_log(namespace, pod, follow=False, last=200 if seen else None)
                lines = [found[1].text for raw in raws if (found := line_of(pod, raw))]
            values = [value for value in map(progress_line.decode, lines) if value is not None]
            for value in values:
                known |= {key: value[key] for key in ("stage", "steps", "attempt", "stopped_early") if key in value}
                known |= {"eval_loss": eval_loss(value["evaluation"])} if "evaluation" in value else {}
            last = list(parse_points(value["point"] for value in values if "point" in value))
            if run.stage is Stage.STARTING:
                run = replace(run, stage=Stage(known["stage"]))
        run = replace(
            run,
            steps=known.get("steps"),
            restarts=known.get("attempt", 0),
            eval_loss=known.get("eval_loss"),
            stopped_early=known.get("stopped_early"),
        )
        return with_progress(run, last)

    def _with_record(self, run: Run, execution: Execution) -> Run:
        try:
            with translated_errors(f"to read the record of {run.name}"), tempfile.TemporaryDirectory() as folder:
                copy = RunLayout(Path(folder)).record
                self._remote.file_access.get_data(self._output_uris(execution)["record"], str(copy))
                record = json.loads(copy.read_text(encoding="utf-8"))
        except BackendError as error:
            # The run succeeded, whether or not this machine can reach the object store.
            return replace(run, message=str(error))
        return replace(
            run,
            step=record["steps"],
            steps=record["steps_asked"],
            loss=record["train_loss"],
            eval_loss=record["eval_loss_after"],
            # Records of earlier versions do not have it.
            stopped_early=record["steps"] if record.get("stopped_early") else None,
            tokens_per_second=record["tokens_per_second"],
            restarts=record["restarts"],
        )

    def _output_uris(self, execution: Execution) -> dict[str, str]:
        """Addresses of the outputs of an execution that succeeded."""
        literals = self._remote.sync_execution(_promoted(execution)).outputs.literals
        kinds = ("model", "report", "record")
        if missing := [kind for kind in kinds if kind not in literals]:
            raise BackendError(
                f"the workflow of execution {execution.id.name} has no outputs {', '.join(missing)}; it has "
                f"{', '.join(sorted(literals)) or 'none'}",
                status=404,
                reason="NotFound",
            )
        return {kind: literals[kind].scalar.blob.uri for kind in kinds}

    def list(self) -> list[Run]:
        """The runs of the last hundred executions, each as its newest execution."""
        with translated_errors("to list runs"):
            recent = self._remote.recent_executions(limit=100)
        newest: dict[str, Execution] = {}
        for execution in recent:
            newest.setdefault(_name(execution), execution)
        return [self._run(execution) for execution in newest.values()]


def _configuration(file: str | None) -> Config:
    """The configuration in `file`, or the one that flytekit finds.

    Raises BackendError if a named file cannot be read: flytekit would silently use this machine instead.
    """
    named = file or os.environ.get("FLYTECTL_CONFIG")
    if not named:
        return Config.auto()
    try:
        text = Path(named).read_text(encoding="utf-8")
        if named.endswith((".yaml", ".yml")) and not isinstance(yaml.safe_load(text), dict):
            raise ValueError("it has no fields")
        return Config.auto(file)
    except (OSError, ValueError, yaml.YAMLError, configparser.Error) as error:
        raise BackendError(
            f"Flyte's configuration {named} cannot be read: {error}; write the file, or set FLYTECTL_CONFIG to another",
            reason="NoConfiguration",
        ) from error


def _execution_name(name: str, number: int) -> str:
    """The name of a run's `number`-th execution. Flyte requires names to begin with a letter."""
    first = name if name[:1].isalpha() else f"run-{name}"
    return first if number == 1 else f"{first}-x{number}"


def _name(execution: Execution) -> str:
    """The name of the run; for an execution that another client started, the execution's own."""
    labels = execution.spec.labels.values or {}
    return str(labels.get(NAME, execution.id.name))


def _phase(execution: Execution) -> Phase:
    return PHASES[execution.closure.phase]


def _started(execution: Execution) -> float | None:
    """When the execution started; None before, where flytekit has 1970."""
    at = execution.closure.started_at
    return at.timestamp() if at is not None and at.timestamp() > 0 else None


def _message(execution: Execution) -> str:
    closure = execution.closure
    if closure.error is not None:
        return error_text(closure.error.message)
    if closure.abort_metadata is not None:
        return str(closure.abort_metadata.cause)
    return ""


def error_text(message: str) -> str:
    """The error in Flyte's message of a failure, without the traceback, the frame and the log lines around it."""
    for start in ("\nMessage:\n", "\u256f\n"):
        # flytekit writes the first before an error; the second is the last corner of the frame around a traceback.
        message = message.rpartition(start)[2]
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith('{"asctime"')]
    return "\n".join(lines[:20])


def _promoted(execution: Execution) -> FlyteWorkflowExecution:
    return FlyteWorkflowExecution.promote_from_model(execution)
