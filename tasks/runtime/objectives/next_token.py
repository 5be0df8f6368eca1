"""`pretrain` and `sft`: predict the next token. The labels select all text, or only what the model has to say."""

from __future__ import annotations

import logging
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
from tasks.runtime.objectives.router_loss import RouterLoss, causal_model
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import NATS

log = logging.getLogger(__name__)


class NextToken:
    """Cross entropy, averaged over the target tokens.

    With `fused`, the patched model computes it without logits. With `routed`, the loss of the model's routers is added:
    in training that of all tokens of the step (`RouterLoss`). Elsewhere, and for a family with a formula of its own,
    the model adds it, one number per batch, which is weighted by the batch's target tokens.
    """

    unit = NATS

    def __init__(self, *, fused: bool, routed: bool = False) -> None:
        self._fused = fused
        self._routed = routed
        self._router_loss: RouterLoss | None = None

    def prepare(self, context: ObjectiveContext) -> PreparedData:
        """Return the data unchanged."""
        causal = causal_model(context.model) if self._routed else None
        if causal is not None:
            training = context.spec.training
            self._router_loss = RouterLoss(causal, training.router_loss)
            if (
                training.router_loss == "step"
                and training.gradient_accumulation_steps > 1
                and context.processes.is_main
            ):
                log.info(
                    "router loss: of all tokens of a step; forward passes more a step, to route later micro-batches: "
                    "%d, or none with training.router_loss 'running'",
                    training.gradient_accumulation_steps - 1,
                )
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

    def step_batches(self, model: nn.Module, batches: list[Batch], processes: Processes) -> list[Batch]:
        """Return the micro-batches unchanged."""
        return batches

    def rolled_back(self) -> None:
        """Do nothing: no step depends on another."""

    def count(self, batch: Batch) -> Tensor:
        """The number of target tokens."""
        return target_tokens(batch)

    def before_step(
        self, model: nn.Module, batches: Iterable[Batch], processes: Processes, max_targets: int | None = None
    ) -> None:
        """Count what the loss of routers depends on beyond a micro-batch. A collective in training."""
        if self._router_loss is not None:
            self._router_loss.begin_step(model, list(batches), processes)

    def micro_batch_loss(
        self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None = None
    ) -> MicroBatchLoss:
        """The loss that the model computes, divided by the target tokens of the whole step."""
        if not self._routed:
            return MicroBatchLoss(self._output(model, batch, items, max_targets).loss, {})
        balance = self._router_loss
        if balance is not None and balance.in_step:
            with balance.alone():
                output = self._output(model, batch, items, max_targets, output_router_logits=True)
            share = balance.share(output.router_logits, batch)
            return MicroBatchLoss(output.loss + balance.coefficient * share, {"router_loss": share.detach()})
        own = target_tokens(batch)
        mean: Tensor = self._output(model, batch, own.clamp(min=1), max_targets).loss
        return MicroBatchLoss(mean * (own / items), {})

    def _output(self, model: nn.Module, batch: Batch, items: Tensor, max_targets: int | None, **more: bool) -> Any:
        inputs: dict[str, Any] = model_inputs(batch)
        if self._fused:
            # Evaluation does not need logits either.
            inputs |= {"skip_logits": True, "max_targets": max_targets}
        labels = next_labels(batch)
        return model(**inputs, **more, labels=labels, shift_labels=labels, num_items_in_batch=items)
