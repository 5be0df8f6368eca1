"""Cross entropy per token, for objectives that compare whole answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strata_kernels import linear_cross_entropy
from tasks.runtime.data.dataset import Batch
from tasks.runtime.objectives.objective import model_inputs, next_labels


def token_losses(model: nn.Module, batch: Batch, *, fused: bool, max_targets: int | None = None) -> Tensor:
    """Cross entropy of the label that each position predicts, in nats: [B, T], fp32; 0 without a label.

    With `fused`, the patched model materializes no logits and computes at most `max_targets` positions. Otherwise it
    computes logits for all positions.
    """
    labels = next_labels(batch)
    if not fused:
        logits: Tensor = model(**model_inputs(batch)).logits
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, softcap=softcap, reduction="none", max_targets=max_targets
        )

    output: Any = model(**model_inputs(batch), head_loss=losses)
    result: Tensor = output.loss
    return result


@torch.no_grad()
def frozen_log_probs(model: nn.Module, batch: Batch, *, fused: bool, max_targets: int | None = None) -> Tensor:
    """Log-probability of the label that each position predicts, without gradients and dropout: [B, T], fp32."""
    training = model.training
    model.eval()
    try:
        return -token_losses(model, batch, fused=fused, max_targets=max_targets)
    finally:
        model.train(training)
