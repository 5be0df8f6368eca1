"""Cross entropy token by token, for objectives that weigh whole answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from strata_kernels import linear_cross_entropy
from tasks.runtime.data.dataset import Batch
from tasks.runtime.objectives.objective import model_inputs, next_labels


def token_losses(model: nn.Module, batch: Batch, *, fused: bool, max_targets: int | None = None) -> Tensor:
    """What each position loses by the label that it predicts, nats: [B, T], fp32; 0 where there is none.

    With `fused`, of a patched model: no logits are held, and of `max_targets` positions at most any are computed. Else
    the model computes all of them.
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
