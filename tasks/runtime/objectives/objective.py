"""What an objective is; `tasks.runtime.objectives` has one file for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import pad

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row, collate
from tasks.runtime.parallel import Strategy
from tasks.runtime.process.ranks import Processes

# What attention by document reads.
_VARLEN_INPUTS = ("sequence_starts", "cu_seqlens", "late_cu_seqlens", "max_seqlen")


class MicroBatchLoss(NamedTuple):
    """What one micro-batch adds to the means over a step: its sums, divided by the items of the whole step."""

    loss: Tensor
    """With gradients."""
    metrics: dict[str, Tensor]
    """What else is told of the step, by name; without gradients."""


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective prepares from, on every process, before the first step."""

    spec: RunSpec
    processes: Processes
    data: PreparedData
    strategy: Strategy
    model: nn.Module
    """As the strategy wrapped it; with the weights that the run starts from, unless it continues."""
    base: str
    """Identifies those weights."""
    continues: bool
    """Whether this attempt loads a checkpoint next."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What that checkpoint notes."""
    collate: Callable[[list[Row]], Batch] = collate
    """Rows to a batch, as the model takes it."""


class Objective(Protocol):
    """From a batch to a loss. It knows neither the framework nor the strategy that `model` is wrapped by.

    The loss of a step is a mean over its items, such as target tokens or pairs of answers. They are counted first, over
    all micro-batches and processes; then every micro-batch gives its share. So all items weigh the same, however
    unevenly they are spread.
    """

    unit: str
    """Of the loss; its exponential is a perplexity where that is `record.NATS`."""

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Called once; returns the data with what rows to train on have to bring. A collective."""

    def metadata(self) -> dict[str, Any]:
        """What a checkpoint notes of what `begin` found, so that what continues from it can tell whether it changed."""

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Called once with the model before training; returns the data with what validation rows have to bring."""

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `tokens` [T], for planning what a step of training computes: its values mean nothing."""

    def count(self, batch: Batch) -> Tensor:
        """Items of a micro-batch: a whole number, on the device of the batch."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The share of a micro-batch, which is on the device of `model`, in a step of so many `items`.

        `max_targets`: at most so many of its positions predict a label, where that is known: the head is spared others.
        """


def model_inputs(batch: Batch) -> Batch:
    """What of a batch the model reads."""
    names = ("input_ids", "position_ids", "attention_mask", *_VARLEN_INPUTS)
    return {name: batch[name] for name in names if name in batch}


def without_varlen_inputs(inputs: Batch) -> Batch:
    """For a model that sees by the positions where documents end."""
    return {name: tensor for name, tensor in inputs.items() if name not in _VARLEN_INPUTS}


def next_labels(batch: Batch) -> Tensor:
    """For each position the label that it predicts: [B, T], -100 where there is none."""
    if "next_labels" in batch:
        # Of a slice of a row, after which others go on.
        return batch["next_labels"]
    return pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)


def target_tokens(batch: Batch) -> Tensor:
    """Tokens of a batch that carry loss. The first token of a row has nothing before it to be predicted from."""
    return (next_labels(batch) != IGNORE_INDEX).sum()
