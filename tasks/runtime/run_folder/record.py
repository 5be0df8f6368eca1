"""The completion record: the only proof that a run finished.

Exit code 0, a green job and a checkpoint on disk also occur with runs that did not finish. Tasks that follow training
therefore read the record and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from strata_platform.file_io import write_atomic

NATS = "nats per token"
"""The unit of losses whose exponential is a perplexity."""


# A metric may be NaN. By default pydantic writes it as null, which cannot be read back as a float.
_CONFIG = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Sample(BaseModel):
    """The model's output for one prompt of the validation split, before and after training."""

    model_config = _CONFIG

    prompt: str
    reference: str
    before: str
    after: str


class TaskScore(BaseModel):
    """The model's score in a task of lm-evaluation-harness, before and after training, by one metric."""

    model_config = _CONFIG

    task: str
    metric: str
    before: float
    after: float
    error: float | None = None
    """Standard error of `after`, where the task has one."""
    higher_is_better: bool | None = None


class Evaluated(BaseModel):
    """An evaluation during training."""

    model_config = _CONFIG

    step: int
    loss: float
    metrics: dict[str, float] = {}
    """Further metrics of the objective, and scores of tasks as `task/metric`."""
    samples: tuple[str, ...] = ()
    """Texts for the prompts of the record's `samples`, with `evaluation.during`."""


class SourceShare(BaseModel):
    """What a run of several sources read of one of them. Samples and tokens are the rows times the source's average."""

    model_config = _CONFIG

    source: str
    weight: float | None
    """The share of rows that the spec asks for, 0 to 1; None for a source that is for evaluation alone."""
    rows: int = 0
    row_share: float = 0.0
    samples: int = 0
    tokens: int = 0
    """Without padding."""
    token_share: float = 0.0
    epochs: float = 0.0
    """How often each row was read, on average."""
    eval_loss_before: float | None = None
    eval_loss_after: float | None = None
    """On the validation rows of this source."""

    def __str__(self) -> str:
        """
        >>> print(SourceShare(source="a.jsonl", weight=0.5, rows=4, row_share=0.5, token_share=0.48, epochs=2.0))
        a.jsonl: 50.0 % of rows (weight 50.0 %), 48.0 % of tokens, 4 rows, 2.00 epochs
        """
        if self.weight is None:
            return f"{self.source}: for evaluation alone"
        return (
            f"{self.source}: {100 * self.row_share:.1f} % of rows (weight {100 * self.weight:.1f} %), "
            f"{100 * self.token_share:.1f} % of tokens, {self.rows:,} rows, {self.epochs:.2f} epochs"
        )


class CompletionRecord(BaseModel):
    """Result of a run. `status` is `complete` only when all requested steps, or those up to early stopping, are done
    and checkpointed.
    """

    model_config = _CONFIG

    status: Literal["complete", "incomplete"]
    name: str
    spec_hash: str
    steps: int
    steps_asked: int
    stopped_early: bool = False
    """Whether early stopping ended the run after `steps`, before `steps_asked`."""
    tokens: int
    """Tokens processed, including padding."""
    target_tokens: int
    train_loss: float
    """Loss of the last step that was not skipped."""
    loss_unit: str = NATS
    """Unit of all losses in the record."""
    eval_loss_before: float | None = None
    eval_loss_after: float | None = None
    eval_metrics: dict[str, float] = {}
    """Further metrics of the objective, for the trained model on the validation split."""
    task_scores: tuple[TaskScore, ...] = ()
    """Scores in `evaluation.tasks`."""
    evaluations: tuple[Evaluated, ...] = ()
    """Evaluations during training."""
    best_step: int | None = None
    """The step of the lowest loss among `evaluations`."""
    checkpoint: str
    """The checkpoint of the trained model: the last complete one, or the best with `load_best_model_at_end`."""
    restarts: int
    """Starts of the training processes after the first one."""
    skipped_steps: int = 0
    """How many of `steps` were skipped because of their loss or their gradients."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint in order to skip data."""
    seconds: float
    """Wall time of training steps, over all attempts."""
    tokens_per_second: float
    """Median over the steps."""
    mfu: float | None = None
    """Model FLOPs utilization, median over the steps, 0 to 1; None when the device's peak FLOP/s is not known."""
    data_wait_seconds: float = 0.0
    """How many of `seconds` the rank that waited longest for data spent waiting for it."""
    peak_memory_bytes: int
    parameters: int
    trainable_parameters: int
    """Parameters with gradients: with an adapter, fewer than `parameters`."""
    device: str
    world_size: int
    data: dict[str, int]
    """Counts of the prepared data: samples read, used and skipped by reason, rows, tokens."""
    sources: tuple[SourceShare, ...] = ()
    """Of several sources, in the order of the spec."""
    kernels: dict[str, int]
    """Number of patched modules, by operator."""
    float8: dict[str, Any] = {}
    """With `training.float8`: `scaling`, and `exact`, the layers for which FP8 was not faster."""
    begun: float | None = None
    """When the first process of the last start began, in seconds since the epoch."""
    startup: dict[str, float] = {}
    """Seconds of each phase of that start, up to its second step, in their order."""
    warmup: dict[str, Any]
    """Kernels compiled before training; see the kernel layer's WarmupReport."""
    versions: dict[str, str]
    code: dict[str, str] = {}
    """The code that the spec names, of objective, rewards, format, callbacks and model, with its digest or commit."""
    samples: tuple[Sample, ...] = ()

    def require_complete(self) -> CompletionRecord:
        """Returns this record. Raises ValueError when the run did not finish."""
        if self.status != "complete":
            raise ValueError(
                f"run {self.name!r} is {self.status}: {self.steps} of {self.steps_asked} steps are done; "
                "start it again with the same spec to continue from its last checkpoint"
            )
        return self

    def save(self, path: Path) -> None:
        """Write as JSON, atomically: a reader sees the old file or the new one."""
        write_json(path, json.loads(self.model_dump_json()))

    @classmethod
    def load(cls, path: Path) -> CompletionRecord:
        """Read a file that `save` wrote. Raises ValueError for any other content."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]
            where = ".".join(map(str, reason["loc"]))
            raise ValueError(
                f"{path} cannot be read: {f'{where}: ' if where else ''}{reason['msg']}; delete it and start the run "
                "again, to write a new one"
            ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically and durably."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode(), durable=True)
