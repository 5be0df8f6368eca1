"""The completion record: the one proof that a run did what was asked.

A process that exits 0, a job that turns green and a checkpoint that exists all happen to runs that did not finish. What
follows a training task asks the record, and the record alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

NATS = "nats per token"
"""The unit of losses whose exponential is a perplexity."""


# A metric may be NaN, which JSON has no number for: by default it would be null, which no reader takes for a number.
_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Sample(BaseModel):
    """What the model writes for one prompt of the validation split."""

    model_config = _CONFIG

    prompt: str
    reference: str
    before: str
    after: str


class TaskScore(BaseModel):
    """How well the model does a task of lm-evaluation-harness, by one of its metrics."""

    model_config = _CONFIG

    task: str
    metric: str
    before: float
    after: float
    error: float | None = None
    """Standard error of `after`, where there is one."""
    higher_is_better: bool | None = None


class CompletionRecord(BaseModel):
    """What a run did. `status` is `complete` only when every step asked for was done and its checkpoint is whole."""

    model_config = _CONFIG

    status: Literal["complete", "incomplete"]
    name: str
    spec_hash: str
    steps: int
    steps_asked: int
    tokens: int
    """Tokens processed, padding included."""
    target_tokens: int
    train_loss: float
    """Loss of the last step that was taken."""
    loss_unit: str = NATS
    """Of all losses here."""
    eval_loss_before: float | None = None
    eval_loss_after: float | None = None
    eval_metrics: dict[str, float] = {}
    """What else the objective tells of the trained model on the validation split."""
    task_scores: tuple[TaskScore, ...] = ()
    """Of `evaluation.tasks`."""
    checkpoint: str
    """The last complete checkpoint."""
    restarts: int
    """Starts of the training processes after the first."""
    skipped_steps: int = 0
    """Of `steps`: those that were not taken, because of their loss or their gradients."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint, to pass over data."""
    seconds: float
    """Wall time of training steps, over all attempts."""
    tokens_per_second: float
    """Median over the steps."""
    mfu: float | None = None
    """Model FLOPs utilization, median over the steps, 0 to 1; none where the peak of the device is not known."""
    data_wait_seconds: float = 0.0
    """Of `seconds`: what the process that waited longest for its data spent on that."""
    peak_memory_bytes: int
    parameters: int
    trainable_parameters: int
    """Those that learn: fewer than all under an adapter."""
    device: str
    world_size: int
    data: dict[str, int]
    """Counts of the prepared data: samples read, used and skipped by reason, rows, tokens."""
    kernels: dict[str, int]
    """Modules patched, by operator."""
    warmup: dict[str, Any]
    """What was compiled before training; see the kernel layer's WarmupReport."""
    versions: dict[str, str]
    samples: tuple[Sample, ...] = ()

    def require_complete(self) -> CompletionRecord:
        """This record. Raises ValueError when the run did not finish."""
        if self.status != "complete":
            raise ValueError(
                f"run {self.name!r} is {self.status}: {self.steps} of {self.steps_asked} steps are done; "
                "start it again with the same spec to continue from its last checkpoint"
            )
        return self

    def save(self, path: Path) -> None:
        """Write as JSON; a reader sees the old file or the new one, never a part."""
        write_json(path, json.loads(self.model_dump_json()))

    @classmethod
    def load(cls, path: Path) -> CompletionRecord:
        """Read what `save` wrote. Raises ValueError for anything else."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]
            where = ".".join(map(str, reason["loc"]))
            raise ValueError(
                f"{path} cannot be read: {f'{where}: ' if where else ''}{reason['msg']}; remove it, and start the run "
                "again to have it written anew"
            ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
