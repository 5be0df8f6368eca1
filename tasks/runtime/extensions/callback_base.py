"""Base class of callbacks of your own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_platform.runs import MetricPoint


@dataclass(frozen=True)
class RunInfo:
    """The run that begins or continues."""

    name: str
    folder: Path
    """The run's folder, `<output>/<name>`."""
    spec: Mapping[str, Any]
    """The spec as plain values, defaults filled in."""
    start: int
    """Steps that are done already; 0 for a new run."""
    steps: int
    """The last step."""


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation on the validation split."""

    step: int
    """Steps that the measured weights have had; 0 before training."""
    loss: float | None
    """None without validation rows."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Gets the events of a run. Override the hooks that you need; the others do nothing.

    Hooks run on rank 0, one at a time, in the order in which the spec lists the callbacks. They see numbers, not the
    model, and random generators are afterwards as they were before: a callback changes no loss. Training waits for a
    hook to return. An exception ends the run.
    """

    def on_train_start(self, run: RunInfo) -> None:
        """Training begins, or continues after `run.start` steps. Once in each attempt."""

    def on_step_end(self, step: int) -> None:
        """Step number `step` has been started on the device, which may still compute; its loss is not known yet."""

    def on_metrics(self, point: MetricPoint) -> None:
        """The numbers of a step are known: once for every step, in order, at most `tracking.log_every` steps later.

        A step that is repeated after a rollback comes again.
        """

    def on_evaluation(self, result: EvaluationResult) -> None:
        """An evaluation is done: during training, and before and after it.

        Those before and after run after training, for which Flyte starts a pod of its own; a new object gets them.
        """

    def on_checkpoint_saved(self, step: int, folder: Path) -> None:
        """The checkpoint of `step` is complete on disk. It is called at the end of a later step, or of training."""

    def on_train_end(self, record: Mapping[str, Any]) -> None:
        """Training is done; `record` is the completion record so far. A run that fails does not get here."""
