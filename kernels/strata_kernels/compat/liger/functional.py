"""`liger_kernel.transformers.functional`: the operators under Liger's names, and its rotary functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy.reduction import Reduction
from .functions import (
    LigerCrossEntropyFunction,
    LigerFusedAddRMSNormFunction,
    LigerFusedLinearCrossEntropyFunction,
    LigerGELUMulFunction,
    LigerLayerNormFunction,
    LigerLlama4RopeFunction,
    LigerQwen2VLMRopeFunction,
    LigerReLUSquaredFunction,
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
    LigerSparsemaxFunction,
)


@dataclass
class CrossEntropyOutput:
    """A loss, and what was asked for beside it."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _output(losses: tuple[Any, ...]) -> Tensor | CrossEntropyOutput:
    """The loss alone, or all if one of the others is there."""
    loss: Tensor = losses[0]
    return loss if all(other is None for other in losses[1:]) else CrossEntropyOutput(*losses)


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
) -> Tensor | CrossEntropyOutput:
    """`linear_cross_entropy`. input: [N, H], weight: [V, H], target: [N]."""
    return _output(
        LigerFusedLinearCrossEntropyFunction.apply(
            input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """`rms_norm`. X: [..., D], W: [D]."""
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`. X, R: [..., D], W: [D]."""
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """`sparsemax`, over the axis `dim`."""
    return LigerSparsemaxFunction.apply(input, dim)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` by angles that come once per pair."""
    return LigerRopeFunction.apply(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of a vision tower. q, k: [S, H, D], cos, sin: [S, D]."""
    rotated = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), cos.float(), sin.float())
    y_q, y_k = (y.transpose(1, 2)[0] for y in rotated)
    return y_q, y_k


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of Llama 4's text model. xq, xk: [B, S, H, D], freqs_cis: [B, S, D / 2], complex."""
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """`rope` of Llama 4's vision tower. query, key: [B, S, H, D], freqs_ci: [S, D / 2], [S, 1, D / 2] or with batch.

    Cast to a real dtype, as `model.bfloat16()` does with the tower's buffer, the angles have lost their imaginary part.
    transformers then multiplies by what is left, and so does this.
    """
    freqs = freqs_ci.to(query.device)
    freqs = freqs.reshape(-1, *freqs.shape[-3::2]) if freqs.dim() == 4 else freqs.reshape(1, -1, freqs.shape[-1])
    if not freqs.is_complex():
        freqs = torch.complex(freqs.float(), torch.zeros_like(freqs, dtype=torch.float32))
    return LigerLlama4RopeFunction.apply(query, key, freqs)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rope` by positions in time, height and width. q: [B, H, S, D], cos, sin: [3, B, S, D]."""
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section)


liger_geglu: Callable[..., Tensor] = LigerGELUMulFunction.apply
liger_swiglu: Callable[..., Tensor] = LigerSiLUMulFunction.apply
liger_layer_norm: Callable[..., Tensor] = LigerLayerNormFunction.apply
liger_relu_squared: Callable[..., Tensor] = LigerReLUSquaredFunction.apply
liger_rope: Callable[..., tuple[Tensor, Tensor]] = LigerRopeFunction.apply
liger_rotary_pos_emb: Callable[..., tuple[Tensor, Tensor]] = LigerRopeFunction.apply
liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb
