"""What the client returns: frozen, typed, the same for every backend. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from math import inf, isfinite, isnan, nan
from typing import Any, Literal


class Phase(StrEnum):
    """State of a run. The first two are active, the others final."""

    QUEUED = "queued"
    """Waits for machines, before its first start or after a preemption."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Its completion record is complete."""
    FAILED = "failed"
    ABORTED = "aborted"
    """Canceled by a person."""
    INTERRUPTED = "interrupted"
    """Its processes ended early and nothing restarts them: submit the run again to continue."""

    @property
    def is_end(self) -> bool:
        """Whether the run stays as it is until it is submitted again."""
        return self not in (Phase.QUEUED, Phase.RUNNING)


class Stage(StrEnum):
    """What an active run is doing."""

    WAITING = "waiting for admission"
    ADMITTED = "admitted"
    PULLING = "pulling the image"
    STARTING = "starting"
    PREPARING = "preparing data"
    WARM_UP = "warming up kernels"
    TRAINING = "training"
    EVALUATING = "evaluating"
    EXPORTING = "exporting"


@dataclass(frozen=True, slots=True)
class Run:
    """The state of a run at one moment."""

    name: str
    backend: str
    phase: Phase
    stage: Stage | None = None
    """None after the end."""
    message: str = ""
    """Why the run waits, failed, or was interrupted."""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    """Starts of the training processes after the first: after kills, preemptions and hangs."""
    step: int = 0
    """Optimizer steps done."""
    steps: int | None = None
    """Optimizer steps of the whole run; None until training knows."""
    loss: float | None = None
    eval_loss: float | None = None
    """Validation loss of the newest evaluation during training; on a cluster, after the end, of the exported model."""
    stopped_early: int | None = None
    """The step at which early stopping ended training."""
    tokens_per_second: float | None = None
    eta: float | None = None
    """Seconds until the last step; None outside training."""
    queue: str | None = None
    position: int | None = None
    """Number of runs before it in the queue."""
    owner: str = ""
    """Who submitted it, by their own account; empty if nobody said so."""
    where: str = ""
    """The run's folder, or the URL of its execution."""

    @property
    def is_done(self) -> bool:
        """Whether the run has ended, in any way."""
        return self.phase.is_end


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of the run printed."""

    time: float
    rank: int | None
    """None for the launcher, or a task without ranks."""
    text: str
    source: str = ""
    """The pod or process that printed it, where the rank does not say it."""
    attempt: int = 0
    kept: str = ""
    """The kept log that it was read from, because the pod's own log is gone: a file in `logs` of the run's folder."""

    @property
    def prefix(self) -> str:
        """The rank or source, in brackets."""
        return f"[{self.source or 'launcher'}]" if self.rank is None else f"[rank {self.rank}]"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One optimizer step over all processes: a line of the run's `metrics.jsonl`, field by field."""

    step: int
    """Optimizer steps done, from 1."""
    attempt: int
    """0 for the first start of the run, plus one for every restart."""
    time: float
    loss: float
    """Mean over the step's target tokens, in nats; or over whatever the objective counts."""
    learning_rate: float
    grad_norm: float | None
    """Global gradient norm before clipping; None with `optimizer.in_backward`."""
    tokens: int
    """Tokens processed since the run's first step, padding included."""
    target_tokens: int
    """Tokens with a loss since the run's first step."""
    tokens_per_second: float
    """Over the steps since the last flush."""
    step_seconds: float
    memory_bytes: int
    """Highest peak so far of any process: allocated by PyTorch on the GPU, resident on the CPU."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the objective, each a mean over the same items as the loss."""
    data_wait_seconds: float = 0.0
    """Longest wait for data of any process, part of `step_seconds`."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1; None if the device's peak is unknown."""
    skipped: int = 0
    """1 if the step was skipped because of its loss or gradients."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MetricPoint:
        """Parse a line's values; ignores fields of later versions. Raises TypeError if they are not a point."""
        point = cls(**{name: _number(value) for name, value in values.items() if name in _POINT})
        if not isinstance(point.metrics, Mapping):
            raise TypeError(f"metrics are {point.metrics!r}, not values by name")
        return replace(point, metrics={name: _number(value) for name, value in point.metrics.items()})

    def to_dict(self) -> dict[str, Any]:
        """The values of a line. NaN and infinities, which JSON lacks, become strings that `of` reads."""
        values = {name: _written(value) for name, value in asdict(self).items()}
        return values | {"metrics": {name: _written(value) for name, value in self.metrics.items()}}


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """An evaluation during training: a line of the run's `metrics.jsonl`, where `eval_` begins the names of results."""

    step: int
    """Optimizer steps done."""
    attempt: int
    time: float
    loss: float
    """Mean over the items of the validation split, in the unit of the training loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the objective, and scores of tasks as `task/metric`."""
    seconds: float = 0.0
    """For which training stood still."""
    samples: tuple[str, ...] = ()
    """Generated texts, in the order of the prompts of `record.json`."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EvaluationPoint | None:
        """Parse a line's values; None if it is the line of a step. Raises TypeError if the values are not valid."""
        if _EVALUATED not in values:
            return None
        results = {name: values[f"eval_{name}"] for name in _RESULTS if f"eval_{name}" in values}
        when = {name: values[name] for name in ("step", "attempt", "time") if name in values}
        point = cls(**when, **{name: _number(value) for name, value in results.items()})
        if not isinstance(point.metrics, Mapping):
            raise TypeError(f"eval_metrics are {point.metrics!r}, not values by name")
        metrics = {name: _number(value) for name, value in point.metrics.items()}
        return replace(point, metrics=metrics, samples=tuple(point.samples))

    def to_dict(self) -> dict[str, Any]:
        """The values of a line. NaN and infinities become strings, as in the line of a step."""
        values = {name: _written(value) for name, value in asdict(self).items()}
        values["metrics"] = {name: _written(value) for name, value in self.metrics.items()}
        return {f"eval_{name}" if name in _RESULTS else name: value for name, value in values.items()}


_EVALUATED = "eval_loss"
_RESULTS = ("loss", "metrics", "seconds", "samples")

_WORDS = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}


def _written(value: Any) -> Any:
    if not isinstance(value, float) or isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


_POINT = frozenset(item.name for item in fields(MetricPoint))


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run."""

    time: float
    reason: str
    """One word, as in Kubernetes: Submitted, Scheduled, Evicted."""
    message: str
    kind: Literal["normal", "warning"] = "normal"
    about: str = ""
    """The object, if it is not the run itself: pod/NAME, workload/NAME."""


@dataclass(frozen=True, slots=True)
class Held:
    """Machines that an attempt of a run, or its evaluation, held for a time."""

    seconds: float
    processes: int
    """One for each GPU, or on the CPU."""
    gpu: str | None
    """The GPU model, as the spec or the driver names it; empty if neither does, None on the CPU."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a run: paths, or URLs in the object store."""

    model: str
    """A Hugging Face model folder."""
    report: str
    record: str

    def items(self) -> tuple[tuple[str, str], ...]:
        """Names and paths, in the order of interest."""
        return ("model", self.model), ("report", self.report), ("record", self.record)
