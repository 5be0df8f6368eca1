"""What Flyte's messages say of a run, and the messages that start one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgpack
from flyteidl.admin.execution_pb2 import Execution
from flyteidl.admin.task_execution_pb2 import TaskExecution
from flyteidl.core import literals_pb2
from flyteidl.core.execution_pb2 import TaskExecution as Phases
from flyteidl.core.execution_pb2 import WorkflowExecution

from strata_platform.errors import BackendError
from strata_platform.runs import Event, Held, Phase

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec

NAME = "strata/run"
"""Label of an execution that holds the name of its run."""
OWNER = "strata/owner"
"""Label of an execution that holds the name of whoever submitted it."""

PHASES = {
    WorkflowExecution.UNDEFINED: Phase.QUEUED,
    WorkflowExecution.QUEUED: Phase.QUEUED,
    WorkflowExecution.RUNNING: Phase.RUNNING,
    WorkflowExecution.SUCCEEDING: Phase.RUNNING,
    WorkflowExecution.FAILING: Phase.RUNNING,
    WorkflowExecution.ABORTING: Phase.RUNNING,
    WorkflowExecution.SUCCEEDED: Phase.SUCCEEDED,
    WorkflowExecution.FAILED: Phase.FAILED,
    WorkflowExecution.TIMED_OUT: Phase.FAILED,
    WorkflowExecution.ABORTED: Phase.ABORTED,
}
# Tasks that run on the GPUs of a spec, by the ends of their names: evaluation, and training on pods x processes.
_FINISH, _TRAINING = "tasks.finish.finish", re.compile(r"tasks\.topology\.train_(\d+)x(\d+)$")
_ENDS = (Phases.SUCCEEDED, Phases.FAILED, Phases.ABORTED)
LIVE = "value_in(phase,{})".format(
    ";".join(WorkflowExecution.Phase.Name(phase) for phase, ours in PHASES.items() if not ours.is_end)
)
"""Flyte's filter of executions that have not ended."""


def run_name(execution: Execution) -> str:
    """The name of the run; for an execution that another client started, the execution's own."""
    return str(execution.spec.labels.values.get(NAME, execution.id.name))


def owner_of(execution: Execution) -> str:
    """Who submitted the run; empty if nobody said so."""
    # flytekit's clients send "placeholder", which Flyte replaces if it asks who calls.
    principal = execution.spec.metadata.principal
    return execution.spec.labels.values.get(OWNER) or ("" if principal == "placeholder" else principal)


def phase_of(execution: Execution) -> Phase:
    """The phase of the run, as Flyte tells it."""
    return PHASES[execution.closure.phase]


def created(execution: Execution) -> float:
    """When the execution was made, in seconds since the epoch."""
    return float(execution.closure.created_at.ToNanoseconds() / 1e9)


def started(execution: Execution) -> float | None:
    """When the execution started; None before."""
    return execution.closure.started_at.ToNanoseconds() / 1e9 or None


def message_of(execution: Execution) -> str:
    """Why the execution failed or was ended."""
    closure = execution.closure
    if closure.HasField("error"):
        return error_text(closure.error.message)
    return closure.abort_metadata.cause if closure.HasField("abort_metadata") else ""


def error_text(message: str) -> str:
    """The error in Flyte's message of a failure, without the traceback, the frame and the log lines around it."""
    for start in ("\nMessage:\n", "\u256f\n"):
        # flytekit writes the first before an error; the second is the last corner of the frame around a traceback.
        message = message.rpartition(start)[2]
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith('{"asctime"')]
    return "\n".join(lines[:20])


def spec_inputs(spec: RunSpec) -> literals_pb2.LiteralMap:
    """The inputs of the workflow, as flytekit's transformer of pydantic models writes them."""
    value = msgpack.dumps(json.loads(spec.model_dump_json()))
    binary = literals_pb2.Binary(value=value, tag="msgpack")
    return literals_pb2.LiteralMap(literals={"spec": literals_pb2.Literal(scalar=literals_pb2.Scalar(binary=binary))})


def spec_values(inputs: literals_pb2.LiteralMap) -> Any:
    """The spec among the inputs of an execution, as JSON; None if there is none."""
    if "spec" not in inputs.literals:
        return None
    try:
        return msgpack.loads(inputs.literals["spec"].scalar.binary.value)
    except ValueError:
        # No message, so no spec either.
        return None


def events_of(execution: Execution) -> list[Event]:
    """Flyte's phases of an execution."""
    by = owner_of(execution)
    found = [Event(created(execution), "Submitted", f"as execution {execution.id.name}{f' of {by}' if by else ''}")]
    if (began := started(execution)) is not None:
        found.append(Event(began, "Started", "Flyte began to run it"))
    phase = phase_of(execution)
    if phase.is_end:
        at = execution.closure.updated_at.ToNanoseconds() / 1e9 or created(execution)
        kind: Literal["normal", "warning"] = "normal" if phase is Phase.SUCCEEDED else "warning"
        found.append(Event(at, phase.value.capitalize(), message_of(execution), kind))
    return found


def is_on_gpus(attempt: TaskExecution) -> bool:
    """Whether the attempt is of a task that runs on the GPUs of the spec: training, or evaluation."""
    name = attempt.id.task_id.name
    return name.endswith(_FINISH) or _TRAINING.search(name) is not None


def held_by(attempt: TaskExecution, spec: Any, until: float) -> Held | None:
    """What an attempt of such a task held, by its inputs; None if it never ran.

    Args:
        spec: As JSON, None where the store has lost it. Other versions may have written it.
        until: The end of an attempt that has none.

    Raises: `BackendError` if the spec does not say what the attempt held.
    """
    closure = attempt.closure
    began = closure.started_at.ToNanoseconds() / 1e9
    if not began:
        return None
    ended = closure.updated_at.ToNanoseconds() / 1e9
    seconds = closure.duration.ToNanoseconds() / 1e9 or max(ended if closure.phase in _ENDS else until, began) - began
    shape = _TRAINING.search(attempt.id.task_id.name)
    return Held(seconds, int(shape[1]) * int(shape[2]) if shape else 1, _gpu_of(spec))


def _gpu_of(spec: Any) -> str | None:
    """The GPU that a spec asks for, empty if it names none; None without GPUs."""
    if spec is None:
        raise BackendError("its inputs are gone")
    resources = spec.get("resources") if isinstance(spec, Mapping) else None
    resources = resources if isinstance(resources, Mapping) else {}
    for field in ("gpu", "gpu_type"):
        if field not in resources:
            raise BackendError(f"the spec among its inputs has no resources.{field}")
    return (resources["gpu_type"] or "") if resources["gpu"] else None
