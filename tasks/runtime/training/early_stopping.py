"""The lowest validation loss so far, and whether to stop because no lower one followed.

The rule is that of `transformers.EarlyStoppingCallback` with `metric_for_best_model="loss"`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strata_platform.spec.run_spec import Evaluation

# Key of the state in a checkpoint's metadata.
_KEY = "evaluation"


class EarlyStopping:
    """The state of evaluation during training; identical on every rank, and stored in checkpoints."""

    def __init__(self, evaluation: Evaluation, metadata: Mapping[str, Any]) -> None:
        """`metadata`: that of the checkpoint that the run resumes from; empty for a new run."""
        self._patience, self._threshold = evaluation.early_stopping_patience, evaluation.early_stopping_threshold
        self.restore(metadata)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Set the state to that of a checkpoint."""
        kept = metadata.get(_KEY, {})
        self.last: int = kept.get("last", 0)
        """The last step that was evaluated; 0 if none was."""
        self.best_loss: float = kept.get("best_loss", math.inf)
        self.best_step: int = kept.get("best_step", 0)
        """The step of the lowest loss; 0 if none was evaluated to a finite one."""
        self.waited: int = kept.get("waited", 0)
        """Evaluations in a row that did not find a loss lower by the threshold."""

    def metadata(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run decides in the same way; {} before the first evaluation."""
        if not self.last:
            return {}
        # JSON has no infinity.
        best = {"best_loss": self.best_loss} if self.best_step else {}
        return {_KEY: {"last": self.last, **best, "best_step": self.best_step, "waited": self.waited}}

    def add(self, step: int, loss: float) -> bool:
        """Add an evaluation; returns whether its loss is the lowest so far. NaN is not lower than any."""
        lower = loss < self.best_loss
        better = lower and (not self.best_step or self.best_loss - loss > self._threshold)
        self.last, self.waited = step, 0 if better else self.waited + 1
        if lower:
            self.best_loss, self.best_step = loss, step
        return lower

    @property
    def is_over(self) -> bool:
        """Whether training has to stop."""
        return self._patience is not None and self.waited >= self._patience


def stopped_early(metadata: Mapping[str, Any], evaluation: Evaluation) -> bool:
    """Whether the run ended with the checkpoint that has this metadata, before its last step."""
    return EarlyStopping(evaluation, metadata).is_over
