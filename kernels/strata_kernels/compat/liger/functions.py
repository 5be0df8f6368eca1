"""`liger_kernel.ops`: for each autograd function of Liger a class whose `apply` takes the same positional arguments.

They compute by the operators of `strata_kernels`, which register their own backward pass: no class here is a
`torch.autograd.Function`. Results have Liger's dtypes. `in_place`, `row_mode` and what else chooses a kernel of Liger's
changes nothing: no tensor of the caller is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...ops.activation.geglu import geglu
from ...ops.activation.relu_squared import relu_squared
from ...ops.activation.swiglu import swiglu, swiglu_packed
from ...ops.cross_entropy import cross_entropy, cross_entropy_with_predictions
from ...ops.cross_entropy.reduction import Reduction
from ...ops.experts.experts import experts
from ...ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_predictions
from ...ops.norm.layer_norm import layer_norm
from ...ops.norm.rms_norm import Cast, add_rms_norm, rms_norm
from ...ops.rotary.rope import rope
from ...ops.sparsemax import sparsemax

# Loss, z-loss, accuracy and predictions; the last three where they are asked for.
Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

_CASTS: dict[str | int, Cast] = {"llama": "llama", "gemma": "gemma", "none": "none", 0: "llama", 1: "gemma", -1: "none"}


def _cast(casting_mode: str | int) -> Cast:
    if casting_mode not in _CASTS:
        raise ValueError(f"casting_mode must be one of {', '.join(map(repr, _CASTS))}, got {casting_mode!r}")
    return _CASTS[casting_mode]


class LigerRMSNormFunction:
    """`rms_norm`."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        """X: [..., D], W: [D] → [..., D], in the dtype of X."""
        return rms_norm(X, W, eps, offset=offset, cast=_cast(casting_mode)).to(X.dtype)


class LigerFusedAddRMSNormFunction:
    """`add_rms_norm`."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """X, R: [..., D], W: [D] → the norm of X + R, in the dtype of X, and X + R."""
        y, h = add_rms_norm(X, R, W, eps, offset=offset, cast=_cast(casting_mode))
        return y.to(X.dtype), h


class LigerLayerNormFunction:
    """`layer_norm`."""

    @staticmethod
    def apply(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
        """X: [..., D], W, B: [D] → [..., D]."""
        return layer_norm(X, W, B, eps)


class LigerSiLUMulFunction:
    """`swiglu`."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        """a, b: [..., D] → [..., D]: `down_multiplier * silu(gate_multiplier * a) * b`."""
        return swiglu(a, b, gate_multiplier=gate_multiplier, multiplier=down_multiplier)


class LigerFusedGateUpSiLUMulFunction:
    """`swiglu_packed`."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """y: [..., 2 * D] → [..., D]."""
        return swiglu_packed(y)


class LigerGELUMulFunction:
    """`geglu`, by the tanh approximation."""

    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        """a, b: [..., D] → [..., D]: `gelu(a, approximate="tanh") * b`."""
        return geglu(a, b, "tanh")


class LigerReLUSquaredFunction:
    """`relu_squared`."""

    @staticmethod
    def apply(X: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return relu_squared(X)


class LigerSparsemaxFunction:
    """`sparsemax`."""

    @staticmethod
    def apply(x: Tensor, dim: int) -> Tensor:
        """x, and the axis whose values become a distribution → the shape of x."""
        return sparsemax(x.transpose(dim, -1)).transpose(dim, -1)


class LigerMLPFunction:
    """The gated feed-forward layer of three weights without biases."""

    @staticmethod
    def apply(
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:
        """input: [..., H], gate_weight, up_weight: [I, H], down_weight: [H, I] → [..., H]."""
        gate, up = linear(input, gate_weight), linear(input, up_weight)
        return swiglu(gate, up, gate_multiplier=gate_multiplier, multiplier=down_multiplier, weight=down_weight)


class LigerFusedMoEFunction:
    """`experts`."""

    @staticmethod
    def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x: [T, H], gate_up_proj: [E, 2 * I, H], down_proj: [E, H, I], the last two: [T, K] → [T, H]."""
        return experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


class LigerRopeFunction:
    """`rope`."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q: [B, H, S, D], k: [B, K, S, D], cos, sin: [B or 1, S, R], or half of that with `rotary_dim` = R."""
        return rope(q, k, cos, sin, rotary_dim=rotary_dim)


class LigerLlama4RopeFunction:
    """`rope` of neighboring features, by complex angles."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        """q: [B, S, H, D], k: [B, S, K, D], freqs_cis: complex [B or 1, S, D / 2], or [..., D] of its two parts."""
        if not freqs_cis.is_complex():
            freqs_cis = torch.view_as_complex(freqs_cis.float().reshape(*freqs_cis.shape[:-1], -1, 2))
        return rope(q, k, freqs_cis, layout="bshd", interleaved=True)


class LigerQwen2VLMRopeFunction:
    """`rope` by positions in time, height and width."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """q: [B, H, S, D], k: [B, K, S, D], cos, sin: [3, B, S, D]."""
        return rope(q, k, cos, sin, mrope_section=mrope_section)


def _mean_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean over the targets that count, 1 if none does: Liger's mean over nothing is 0, not NaN."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum().clamp(min=1)
    total = (weight.float()[target.where(counted, 0)] * counted).sum()
    return torch.where(counted.any(), total, 1.0)


def _accuracy(predictions: Tensor | None, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    assert predictions is not None
    counted = target != ignore_index
    right = ((predictions == target) & counted).float()
    return right if reduction == "none" else right.sum() / counted.sum()


class LigerCrossEntropyFunction:
    """`cross_entropy`. With a weight per class, the mean of the z-loss is weighted as that of the cross entropy."""

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
        items = _mean_of(target, weight, ignore_index) if reduction == "mean" else None
        options: dict[str, Any] = {
            "weight": weight, "ignore_index": ignore_index, "softcap": softcap, "reduction": reduction,
            "num_items": items,
        }  # fmt: skip
        predictions = None
        if return_token_accuracy or return_predicted_tokens:
            loss, predictions, _ = cross_entropy_with_predictions(
                _input, target, z_loss=lse_square_scale, label_smoothing=label_smoothing, **options
            )
        else:
            loss = cross_entropy(_input, target, z_loss=lse_square_scale, label_smoothing=label_smoothing, **options)
        z_loss = None
        if return_z_loss:
            with torch.no_grad():
                z_loss = loss.detach() - cross_entropy(_input, target, label_smoothing=label_smoothing, **options)
        return (
            loss.to(_input.dtype),
            None if z_loss is None else z_loss.to(_input.dtype),
            _accuracy(predictions, target, ignore_index, reduction) if return_token_accuracy else None,
            predictions if return_predicted_tokens else None,
        )


class LigerFusedLinearCrossEntropyFunction:
    """`linear_cross_entropy`. The gradient of the weight is rounded once, whatever `accum_dtype`."""

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
        row_weight = None
        if use_token_scaling:
            with torch.no_grad():
                nll = linear_cross_entropy(_input, weight, target, reduction="none", **options)
                row_weight = (-nll).exp()
        options |= {
            "class_weight": ce_weight, "reduction": reduction, "row_weight": row_weight,
            "label_smoothing": label_smoothing,
            "num_items": _mean_of(target, ce_weight, ignore_index) if reduction == "mean" else None,
        }  # fmt: skip
        predictions = None
        if return_token_accuracy or return_predicted_tokens:
            loss, predictions, _ = linear_cross_entropy_with_predictions(
                _input, weight, target, z_loss=lse_square_scale, **options
            )
        else:
            loss = linear_cross_entropy(_input, weight, target, z_loss=lse_square_scale, **options)
        z_loss = None
        if return_z_loss:
            with torch.no_grad():
                z_loss = loss.detach() - linear_cross_entropy(_input, weight, target, **options)
        return (
            loss,
            None if z_loss is None else z_loss.to(_input.dtype),
            _accuracy(predictions, target, ignore_index, reduction) if return_token_accuracy else None,
            predictions if return_predicted_tokens else None,
        )
