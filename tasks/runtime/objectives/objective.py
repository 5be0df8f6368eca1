"""The interface of objectives, and helpers that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import IGNORE_INDEX, MODEL_INPUT, ROPE_COLUMNS, Batch, Row, collate
from tasks.runtime.generation import Generator
from tasks.runtime.parallel import Strategy
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes

# Inputs of varlen attention in a batch.
_VARLEN_INPUTS = ("sequence_starts", "cu_seqlens", "late_cu_seqlens", "max_seqlen", "row_starts", "row_cu_seqlens")


class MicroBatchLoss(NamedTuple):
    """What a micro-batch adds to the means over a step: its sums, divided by the items of the whole step."""

    loss: Tensor
    """Has gradients."""
    metrics: dict[str, Tensor]
    """Other values to log, by name; without gradients."""


@dataclass(frozen=True)
class ObjectiveContext:
    """What `Objective.prepare` gets on every rank before the first step."""

    spec: RunSpec
    processes: Processes
    data: PreparedData
    strategy: Strategy
    model: nn.Module
    """The model as the strategy wrapped it, with the initial weights unless the run resumes."""
    base: str
    """Fingerprint of the initial weights."""
    continues: bool
    """Whether a checkpoint is loaded next."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """That checkpoint's metadata."""
    collate: Callable[[list[Row]], Batch] = collate
    """Makes a batch of rows, with the inputs that the model takes."""
    whole: WholeModel | None = None
    """The model that answers prompts; None for objectives that generate nothing."""
    generator: Generator | None = None
    """The engine that answers them, with the weights of `whole`."""
    steps: int | None = None
    """The last step of the run, if it is known."""


class Objective(Protocol):
    """Computes a loss from a batch, for any framework and any strategy.

    The loss of a step is a mean over items: target tokens, or pairs of answers. The items of all micro-batches and
    ranks are counted first. Then each micro-batch divides its sum by that count. All items weigh the same, however
    unevenly they are distributed.
    """

    unit: str
    """Unit of the loss. Its exponential is a perplexity if the unit is `record.NATS`."""

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Called once. Returns the data with the additional columns that training rows need. A collective."""

    def metadata(self) -> dict[str, Any]:
        """Metadata for checkpoints about what `prepare` found, so that a resumed run can detect a change."""

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Called once with the model before training. Returns the data with the columns that validation rows need."""

    def example_row(self, tokens: Tensor) -> Batch:
        """A row with `tokens` [T], for planning kernels; its values have no meaning."""

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Called first in each step with its micro-batches, on the host. Returns those to learn from, as many: the same
        ones, or with what the model generates for them. A collective. Evaluation does not call it.
        """

    def rolled_back(self) -> None:
        """Called on every rank when training has returned to a checkpoint. Drops all that is left of the steps after
        it, so that the next step is the one of a run that resumes there.
        """

    def count(self, batch: Batch) -> Tensor:
        """Number of items in a micro-batch: an integer scalar on the batch's device."""

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Called before the losses of a step with all of its micro-batches, on the host: for what the losses need of
        the whole step beside `items`. A collective. Evaluation calls it with all micro-batches of a source.

        `max_targets`: as in `micro_batch_loss`, where the labels have no values, on the meta device.
        """

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The loss of a micro-batch in a step of `items` items. `batch` is on the device of `model`.

        `max_targets`: upper bound of the positions with a label, if known; the head skips the others.
        """


def model_inputs(batch: Batch) -> Batch:
    """The entries of a batch that a model takes.

    With positions in three dimensions, `position_ids` is [4, B, T]: those in the text first, by which transformers
    keeps packed sequences apart.
    """
    names = ("input_ids", "position_ids", "attention_mask", *_VARLEN_INPUTS)
    inputs = {name: batch[name] for name in names if name in batch}
    if ROPE_COLUMNS[0] in batch:
        inputs["position_ids"] = torch.stack([batch[name] for name in ("position_ids", *ROPE_COLUMNS)])
    own = {name.removeprefix(MODEL_INPUT): batch[name] for name in batch if name.startswith(MODEL_INPUT)}
    return inputs | own


def without_varlen_inputs(inputs: Batch) -> Batch:
    """Remove the inputs of varlen attention, for a model that derives sequences from `position_ids`."""
    return {name: tensor for name, tensor in inputs.items() if name not in _VARLEN_INPUTS}


def next_labels(batch: Batch) -> Tensor:
    """The label that each position predicts: [B, T], -100 where there is none."""
    if "next_labels" in batch:
        # The batch has a slice of each row; the next label of its last token is in another slice.
        return batch["next_labels"]
    return pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)


def next_values(values: Tensor) -> Tensor:
    """What rows have of each token [B, T, ...], at the position that predicts it."""
    return torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)


def target_tokens(batch: Batch) -> Tensor:
    """Number of tokens that carry loss. The first token of a row does not: nothing predicts it."""
    return (next_labels(batch) != IGNORE_INDEX).sum()
