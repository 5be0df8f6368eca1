"""Liger's cross entropies, of logits and of hidden states: autograd functions, modules and functional forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy import cross_entropy, cross_entropy_with_predictions
from ...ops.cross_entropy.reduction import Reduction
from ...ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_predictions
from ...ops.linear_cross_entropy.linear_logprobs import linear_logprobs, linear_logprobs_with_entropy
from .options import WithOptions

# (loss, z-loss, accuracy, predictions); None for what is not requested.
Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass
class CrossEntropyOutput:
    """A loss and the other requested results."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _output(losses: tuple[Any, ...]) -> Tensor | CrossEntropyOutput:
    """The loss only, or a `CrossEntropyOutput` if another result was requested."""
    loss: Tensor = losses[0]
    return loss if all(other is None for other in losses[1:]) else CrossEntropyOutput(*losses)


def _losses(
    operators: tuple[Callable[..., Tensor], Callable[..., Any]],
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    class_weight: Tensor | None,
    z_loss_scale: float,
    *,
    z_loss: bool,
    token_accuracy: bool,
    predicted_tokens: bool,
) -> Losses:
    """`Losses` by an operator and its variant with predictions.

    tensors: leading arguments of the operators; the target is the last.
    """
    target, ignore_index, reduction = tensors[-1], options["ignore_index"], options["reduction"]
    if reduction == "mean":
        options["num_items"] = _divisor(target, class_weight, ignore_index)
    operator, with_predictions = operators
    predictions, accuracy, found = None, None, None
    if token_accuracy or predicted_tokens:
        loss, predictions, _ = with_predictions(*tensors, z_loss=z_loss_scale, **options)
    else:
        loss = operator(*tensors, z_loss=z_loss_scale, **options)
    if z_loss:
        with torch.no_grad():
            # The z-loss is linear in its scale. With the small original scale, the difference would be rounding error.
            squares = operator(*tensors, z_loss=z_loss_scale + 1.0, **options) - loss
            found = (z_loss_scale * squares).to(tensors[0].dtype)
    if token_accuracy:
        counted = target != ignore_index
        right = ((predictions == target) & counted).float()
        accuracy = right if reduction == "none" else right.sum() / counted.sum()
    return loss, found, accuracy, predictions if predicted_tokens else None


def _divisor(target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of the mean; 1 if all targets are ignored: Liger's mean is then 0, not NaN."""
    counted = target != ignore_index
    if class_weight is None:
        return counted.sum().clamp(min=1)
    total = (class_weight.float()[target.where(counted, 0)] * counted).sum()
    return torch.where(counted.any(), total, 1.0)


class LigerCrossEntropyFunction:
    """`cross_entropy`. With class weights, the mean of the z-loss has the same weighted divisor."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Losses:
        """_input: [..., V], target: [...] → the loss in the dtype of _input, z-loss, accuracy and predictions."""
        options = {
            "weight": weight, "ignore_index": ignore_index, "softcap": softcap, "reduction": reduction,
            "label_smoothing": label_smoothing,
        }  # fmt: skip
        loss, z_loss, accuracy, predictions = _losses(
            (cross_entropy, cross_entropy_with_predictions), (_input, target), options, weight, lse_square_scale,
            z_loss=return_z_loss, token_accuracy=return_token_accuracy, predicted_tokens=return_predicted_tokens,
        )  # fmt: skip
        return loss.to(_input.dtype), z_loss, accuracy, predictions


class LigerFusedLinearCrossEntropyFunction:
    """`linear_cross_entropy`. The weight gradient is rounded once; `accum_dtype` is ignored."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> Losses:
        """_input: [..., H], weight: [V, H], target: [...] → the loss in fp32, z-loss, accuracy and predictions."""
        options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "softcap": softcap}
        tensors = (_input, weight, target)
        if use_token_scaling:
            with torch.no_grad():
                options["row_weight"] = (-linear_cross_entropy(*tensors, reduction="none", **options)).exp()
        options |= {"class_weight": ce_weight, "label_smoothing": label_smoothing, "reduction": reduction}
        return _losses(
            (linear_cross_entropy, linear_cross_entropy_with_predictions), tensors, options, ce_weight,
            lse_square_scale, z_loss=return_z_loss, token_accuracy=return_token_accuracy,
            predicted_tokens=return_predicted_tokens,
        )  # fmt: skip


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """`cross_entropy`, with the arguments of `torch.nn.functional.cross_entropy`. input: [N, V], target: [N]."""
    return _output(
        LigerCrossEntropyFunction.apply(
            input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
            return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """`linear_cross_entropy`. input: [N, H], weight: [V, H], target: [N]."""
    return _output(
        LigerFusedLinearCrossEntropyFunction.apply(
            input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip


class LigerFusedLinearScaledCrossEntropyFunction:
    """`linear_logprobs`: negative log-probability of each token at a temperature, and optionally its entropy."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """_input: [N, H], weight: [V, H], target: [N] → [N], or two tensors [N]."""
        if selected_token_ids is not None:
            raise ValueError("selected_token_ids is not provided: pass logits to strata_kernels.selective_log_softmax")
        options: dict[str, Any] = {"temperature": temperature, "ignore_index": ignore_index}
        if not return_entropy:
            return -linear_logprobs(_input, weight, target, **options)
        log_probs, entropy = linear_logprobs_with_entropy(_input, weight, target, **options)
        return -log_probs, entropy


class LigerCrossEntropyLoss(WithOptions):
    """`liger_cross_entropy` as a module."""

    function: Any = LigerCrossEntropyFunction
    defaults = {  # noqa: RUF012
        "weight": None, "ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean",
        "softcap": None, "return_z_loss": False, "return_token_accuracy": False, "return_predicted_tokens": False,
    }  # fmt: skip

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """_input: [N, V], target: [N] → the loss, or `CrossEntropyOutput` if more is requested."""
        return _output(self.call(_input, target))


class LigerFusedLinearCrossEntropyLoss(WithOptions):
    """`liger_fused_linear_cross_entropy` as a module."""

    function: Any = LigerFusedLinearCrossEntropyFunction
    defaults = {  # noqa: RUF012
        "ce_weight": None, "ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean",
        "softcap": None, "return_z_loss": False, "accum_dtype": None, "use_token_scaling": False,
        "return_token_accuracy": False, "return_predicted_tokens": False,
    }  # fmt: skip

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """lin_weight: [V, H], _input: [N, H], target: [N] → the loss, or `CrossEntropyOutput` if more is requested."""
        return _output(self.call(_input, lin_weight, target, bias))
