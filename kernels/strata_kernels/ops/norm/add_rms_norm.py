"""A residual connection and the root-mean-square normalization behind it, in one pass.

    h  = x + residual, rounded to their dtype                   y  = h · rstd(h) · (offset + w)
    dx = dresidual = rms_norm_bwd(dy; h) + dh                   dw = Σ_rows dy · h · rstd(h)

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).

The kernels are those of `host`. Where only one output's gradient arrives, no zeros are made for the other. Bytes
moved per element at the least: forward and backward 4·itemsize each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._launch import describe
from .._operator import is_transformed, register
from .host import norm_forward, norm_reference, normalized_like, statistics_like, unfilled
from .rms_norm import Cast, _RMSNormBackward, check, rms_norm_gradients


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    return normalized_like(x, weight, cast), unfilled(x), statistics_like(x, center=False)


def _run(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_forward(x, residual, weight, None, eps, offset, cast, center=False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, *ctx.settings = inputs
    _, h, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, weight, stats)


def _autograd(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dh, dh, None, None, None, None
    h, weight, stats = ctx.saved_tensors
    if torch.is_grad_enabled():
        dx, dw = rms_norm_gradients(dy, h, weight, *ctx.settings)
        dx = dx if dh is None else dx + dh
        return dx, dx, dw, None, None, None
    weight_grad = ctx.needs_input_grad[2]
    _, offset, _ = ctx.settings
    dx, dw = _RMSNormBackward.apply(dy, dh, h, weight, stats, offset, weight_grad)
    return dx, dx, dw if weight_grad else None, None, None, None


_add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str cast)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_autograd,
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> tuple[Tensor, Tensor]:
    """`h = x + residual; y = rms_norm(h, weight, eps, offset=offset, cast=cast)`, fused; returns y and h.

    h is rounded as PyTorch rounds the sum, and y is computed from the rounded h. It is plain PyTorch under
    `torch.func`.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides. fp64 runs in plain PyTorch on every device.
        residual: the same shape, dtype and device.
        weight: [D], or None for no weight.
        eps, offset, cast: as in `rms_norm`.

    Returns:
        y, [..., D], contiguous, in the dtype that `rms_norm` gives; h, [..., D], contiguous, in the dtype of x.

    Raises:
        ValueError: x and residual differ in shape, dtype or device, or what `rms_norm` raises.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), eps=0.0)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    check(x, weight, cast)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        shapes = f"{describe(x)} and {describe(residual)}"
        raise ValueError(f"x and residual must have one shape and one dtype, got {shapes}")
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device} and x on {x.device}: move one of them")
    if is_transformed():
        return norm_reference(x, residual, weight, None, eps, offset, cast, center=False)[:2]
    y, h, _ = _add_rms_norm(x, residual, weight, eps, offset, cast)
    return y, h
