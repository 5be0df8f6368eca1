"""What the client tells of runs: frozen, typed, the same of every backend. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from math import inf, isfinite, isnan, nan
from typing import Any, Literal


class Phase(StrEnum):
    """Where a run is in its life. The first two go on, the others are its end."""

    QUEUED = "queued"
    """Waits for machines: before its first start, or after it had to give them back."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Has a completion record that says so."""
    FAILED = "failed"
    ABORTED = "aborted"
    """Canceled by a person."""
    INTERRUPTED = "interrupted"
    """Its processes are gone before its end, and nothing starts them again by itself: submit it again to continue."""

    @property
    def is_end(self) -> bool:
        """Whether nothing happens any more unless the run is submitted again."""
        return self not in (Phase.QUEUED, Phase.RUNNING)


class Stage(StrEnum):
    """What a run that goes on is doing."""

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
    """A run as it is now."""

    name: str
    backend: str
    phase: Phase
    stage: Stage | None = None
    """None at the end."""
    message: str = ""
    """Why it waits, failed, or was interrupted."""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    restarts: int = 0
    """Starts of the training processes after the first that were not asked for: kills, preemptions, hangs."""
    step: int = 0
    """Optimizer steps done."""
    steps: int | None = None
    """All that are asked for; None until training knows."""
    loss: float | None = None
    tokens_per_second: float | None = None
    eta: float | None = None
    """Seconds until the last step; None outside of training."""
    queue: str | None = None
    position: int | None = None
    """How many are before it in the queue."""
    where: str = ""
    """The run's folder, or the address of its execution."""

    @property
    def is_done(self) -> bool:
        """Whether the run is at its end, good or bad."""
        return self.phase.is_end


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of the run printed."""

    time: float
    rank: int | None
    """None: the launcher, or a task without ranks."""
    text: str
    source: str = ""
    """The process or pod it is of, where that is more than the rank."""
    attempt: int = 0

    @property
    def prefix(self) -> str:
        """Who said it, in brackets."""
        return f"[{self.source or 'launcher'}]" if self.rank is None else f"[rank {self.rank}]"


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One optimizer step, over all processes: a line of the run's `metrics.jsonl`, field by field."""

    step: int
    """Optimizer steps done, from 1."""
    attempt: int
    """0 for the first start of the run, one more for every restart."""
    time: float
    loss: float
    """Mean over the step: over its target tokens, nats, or over what else the objective counts."""
    learning_rate: float
    grad_norm: float | None
    """Global gradient norm before clipping; None with `optimizer.in_backward`."""
    tokens: int
    """Tokens processed since the run's first step, padding included."""
    target_tokens: int
    """Tokens that carried a loss since the run's first step."""
    tokens_per_second: float
    """Over the steps since the last flush."""
    step_seconds: float
    memory_bytes: int
    """Peak so far of the busiest process: allocated on the GPU by PyTorch, resident on the CPU."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the objective tells of the step beside its loss, each a mean over the same items."""
    data_wait_seconds: float = 0.0
    """Of `step_seconds`: what the process that waited longest for its data spent on that."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1; None where the peak of the device is not known."""
    skipped: int = 0
    """1 where the step was not taken, because of its loss or its gradients."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MetricPoint:
        """From a line's values; what later versions add is left out. Raises TypeError where it is of no point."""
        point = cls(**{name: _number(value) for name, value in values.items() if name in _POINT})
        if not isinstance(point.metrics, Mapping):
            raise TypeError(f"metrics are {point.metrics!r}, not values by name")
        return replace(point, metrics={name: _number(value) for name, value in point.metrics.items()})

    def to_dict(self) -> dict[str, Any]:
        """The values of a line. NaN and infinities, which JSON has no numbers for, are words that `of` reads."""
        values = {name: _written(value) for name, value in asdict(self).items()}
        return values | {"metrics": {name: _written(value) for name, value in self.metrics.items()}}


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
    """Something that happened to the run."""

    time: float
    reason: str
    """One word, as Kubernetes has them: Submitted, Scheduled, Evicted."""
    message: str
    kind: Literal["normal", "warning"] = "normal"
    about: str = ""
    """Which object, where that is not the run itself: pod/NAME, workload/NAME."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a finished run left: paths, or addresses in the object store."""

    model: str
    """Folder of a Hugging Face model."""
    report: str
    record: str

    def items(self) -> tuple[tuple[str, str], ...]:
        """Names and places, in the order that people look for them."""
        return ("model", self.model), ("report", self.report), ("record", self.record)
