"""`pretrain` and `sft`: predict the next token. The labels select all text, or only what the model has to say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData
from tasks.runtime.data.dataset import Batch
from tasks.runtime.objectives.objective import (
    MicroBatchLoss,
    ObjectiveContext,
    model_inputs,
    next_labels,
    target_tokens,
)
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import NATS


class NextToken:
    """Cross entropy, averaged over the target tokens.

    With `fused`, the patched model computes it without logits. With `routed`, the model adds an auxiliary loss of its
    routers, one number per batch; it is weighted by the batch's target tokens, so its weight does not depend on the
    number of micro-batches.
    """

    unit = NATS

    def __init__(self, *, fused: bool, routed: bool = False) -> None:
        self._fused = fused
        self._routed = routed

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Return the data unchanged."""
        return context.data

    def metadata(self) -> dict[str, Any]:
        """Empty: the data and the base weights have their own metadata."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """Return the data unchanged."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """The columns of a row."""
        return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)

    def count(self, batch: Batch) -> Tensor:
        """The number of target tokens."""
        return target_tokens(batch)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Do nothing."""

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The loss that the model computes, divided by the target tokens of the whole step."""
        if not self._routed:
            return MicroBatchLoss(self._loss(model, batch, items, max_targets), {})
        own = target_tokens(batch)
        mean = self._loss(model, batch, own.clamp(min=1), max_targets)
        return MicroBatchLoss(mean * (own / items), {})

    def _loss(self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None) -> Tensor:
        inputs: dict[str, Any] = model_inputs(batch)
        if self._fused:
            # Evaluation does not need logits either.
            inputs |= {"skip_logits": True, "max_targets": max_targets}
        labels = next_labels(batch)
        output: Any = model(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=items)
        loss: Tensor = output.loss
        return loss
