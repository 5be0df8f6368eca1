"""`custom`: an objective of the user's, in the place of a built-in one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.objectives import Custom as Settings
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch
from tasks.runtime.extensions import BatchObjective, LossSums, ObjectiveBatch, TokenObjective
from tasks.runtime.extensions.import_object import code_digest, make_object
from tasks.runtime.objectives.head_sums import Head, head_sums
from tasks.runtime.objectives.objective import (
    MicroBatchLoss,
    ObjectiveContext,
    model_inputs,
    next_labels,
    target_tokens,
)
from tasks.runtime.process.ranks import Processes

log = logging.getLogger(__name__)

FIELD = "objective.object"
_GROUP = "strata.objectives"


def load_objective(settings: Settings) -> TokenObjective | BatchObjective:
    """The object that the spec names. Raises ValueError if it cannot be made."""
    bases = (TokenObjective, BatchObjective)
    made: TokenObjective | BatchObjective = make_object(
        settings.object,
        settings.arguments,
        bases,
        field=FIELD,
        group=_GROUP,
    )
    return made


def require_objective(objective: Objective) -> None:
    """Raises ValueError if the spec names an objective that cannot be made here."""
    if isinstance(objective, Settings):
        load_objective(objective)


class Custom:
    """Runs an objective of the user's: divides its sums by the items of the whole step."""

    def __init__(self, settings: Settings, *, fused: bool) -> None:
        self.name, self._fused = settings.object, fused
        self._objective = load_objective(settings)
        self.unit = self._objective.unit

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Return the data unchanged."""
        if context.processes.is_main:
            by_chunks = self._fused and isinstance(self._objective, TokenObjective)
            how = "logits in chunks" if by_chunks else "all logits of a forward pass"
            log.info("objective: %s, code %s, from %s", self.name, code_digest(type(self._objective)), how)
        return context.data

    def metadata(self) -> dict[str, Any]:
        """Empty: the objective keeps no state."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a row."""
        return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Return the micro-batches unchanged."""
        return batches

    def rolled_back(self) -> None:
        """Do nothing: no step depends on another."""

    def count(self, batch: Batch) -> Tensor:
        """The number of items."""
        if isinstance(self._objective, TokenObjective):
            return target_tokens(batch)
        return self._objective.count(_own_batch(batch))

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The objective's sums, divided by the items of the whole step."""
        if isinstance(self._objective, TokenObjective):
            sums = token_loss_sums(self._objective, model, batch, max_targets, fused=self._fused)
        else:
            sums = self._objective.loss_sums(model, _own_batch(batch))
        metrics = {name: (value.detach() / items).float() for name, value in sums.metrics.items()}
        return MicroBatchLoss(sums.loss / items, metrics)


def token_loss_sums(
    objective: TokenObjective, model: nn.Module, batch: Batch, max_targets: int | None = None, *, fused: bool
) -> LossSums:
    """Sums of losses and metrics over the target tokens of a batch.

    With `fused`, the patched model computes logits in chunks, of at most `max_targets` positions.
    """
    labels = next_labels(batch).flatten()
    # Positions with a label first, in order; the others add nothing.
    kept = (labels == IGNORE_INDEX).to(torch.uint8).argsort(stable=True)[:max_targets]
    labels = labels[kept]
    names: list[str] = []

    def sums_of(logits: Tensor, part: slice) -> Tensor:
        learned = labels[part] != IGNORE_INDEX
        # Rows without a label get one that exists, so that an objective need not know of them.
        targets = labels[part].clamp(min=0)
        losses = objective.token_losses(logits, targets)
        with torch.no_grad():
            metrics = objective.token_metrics(logits.detach(), targets)
        names[:] = metrics
        return torch.stack([_sum(values, learned) for values in (losses, *metrics.values())])

    def loss(hidden: Tensor, *head: Any) -> Tensor:
        return torch.stack(head_sums(hidden.flatten(0, 1)[kept], Head(*head), sums_of))

    inputs = model_inputs(batch)
    sums: Tensor = model(**inputs, head_loss=loss).loss if fused else loss(model(**inputs).logits)
    return LossSums(sums[0], dict(zip(names, sums[1:].detach(), strict=True)))


def _sum(values: Tensor, learned: Tensor) -> Tensor:
    if values.shape != learned.shape:
        raise ValueError(
            f"{FIELD}: token_losses and token_metrics return a value for each of the {learned.numel()} tokens, but one "
            f"has the shape {tuple(values.shape)}"
        )
    return values.where(learned, 0.0).sum()


def _own_batch(batch: Batch) -> ObjectiveBatch:
    return ObjectiveBatch(model_inputs(batch), next_labels(batch))
