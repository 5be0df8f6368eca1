"""`pretrain` and `sft`: the next token, of all text or of what the model is to say; the labels tell which."""

from __future__ import annotations

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
from tasks.runtime.run_folder.record import NATS


class NextToken:
    """Cross entropy, averaged over the target tokens; of a patched model with `fused`.

    With `routed` the model adds a loss of its routers, one number for a batch. It weighs as much as the target tokens
    of its batch, and so the same in however many batches a step is.
    """

    unit = NATS

    def __init__(self, *, fused: bool, routed: bool = False) -> None:
        self._fused = fused
        self._routed = routed

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """The rows bring all that is needed."""
        return context.data

    def metadata(self) -> dict[str, Any]:
        """None: the data and the first model have theirs."""
        return {}

    def prepare_validation(self, model: nn.Module, data: PreparedData, spec: RunSpec) -> PreparedData:
        """The rows bring all that is needed."""
        return data

    def example_row(self, tokens: Tensor) -> Batch:
        """What rows are made of."""
        return dict.fromkeys(("input_ids", "labels", "position_ids"), tokens)

    def count(self, batch: Batch) -> Tensor:
        """Target tokens."""
        return target_tokens(batch)

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The loss that the model itself computes, divided by the targets of the whole step."""
        if not self._routed:
            return MicroBatchLoss(self._loss(model, batch, items, max_targets), {})
        own = target_tokens(batch)
        mean = self._loss(model, batch, own.clamp(min=1), max_targets)
        return MicroBatchLoss(mean * (own / items), {})

    def _loss(self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None) -> Tensor:
        inputs: dict[str, Any] = model_inputs(batch)
        if self._fused:
            # In evaluation, too, nobody wants the logits.
            inputs |= {"skip_logits": True, "max_targets": max_targets}
        labels = next_labels(batch)
        output: Any = model(**inputs, labels=labels, shift_labels=labels, num_items_in_batch=items)
        loss: Tensor = output.loss
        return loss
