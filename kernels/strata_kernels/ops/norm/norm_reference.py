"""The norms in plain PyTorch, and the shapes and dtypes of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from .._launch import accumulator

# Zeros after the statistics, arrival counters of the backward kernel: one for all groups, then one per group.
COUNTERS = 16


def unfilled(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized contiguous tensor with the shape and device of x, and its dtype unless `dtype` is given."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def normalized_like(x: Tensor, weight: Tensor | None, cast: str) -> Tensor:
    """An uninitialized y, in the dtype that x and weight promote to; for "gemma", in the dtype of x."""
    if weight is None or weight.dtype == x.dtype or cast == "gemma":
        return unfilled(x)
    return unfilled(x, torch.promote_types(x.dtype, weight.dtype))


def statistics_like(x: Tensor, center: bool) -> Tensor:
    """An uninitialized vector of the saved statistics: rstd of all rows, their means if `center`, counters."""
    n_rows = x.numel() // x.shape[-1]
    return x.new_empty(n_rows * (1 + center) + COUNTERS, dtype=accumulator(x.dtype))


def gradient_like(weight: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    """An uninitialized gradient of a weight or bias; empty if it is not computed."""
    return unfilled(weight) if weight is not None and wanted else x.new_empty(0)


def norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, cast: str, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`norm_forward` in plain PyTorch, differentiable."""
    h = x if residual is None else x + residual
    wide = h.to(accumulator(x.dtype))
    mean = wide.mean(-1, keepdim=True) if center else None
    wide = wide if mean is None else wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * (rstd.to(x.dtype) if cast == "none" else rstd)
    y = y if cast == "gemma" else y.to(x.dtype)
    if weight is not None:
        y = y * _scale(weight, offset)
    if bias is not None:
        y = y + bias
    means = [] if mean is None else [mean.reshape(-1)]
    stats = torch.cat([rstd.reshape(-1), *means, rstd.new_zeros(COUNTERS)])
    return y.to(normalized_like(x, weight, cast).dtype).contiguous(), h.contiguous(), stats


def norm_backward_reference(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float, center: bool,
    dw: Tensor | None, db: Tensor | None,
) -> Tensor:  # fmt: skip
    """`norm_backward` in plain PyTorch."""
    n_rows = x.numel() // x.shape[-1]
    rstd = stats[:n_rows].view(*x.shape[:-1], 1)
    xhat = x.to(stats.dtype)
    if center:
        xhat = xhat - stats[n_rows : 2 * n_rows].view(*x.shape[:-1], 1)
    xhat = xhat * rstd
    g = dy.to(stats.dtype)
    if dw is not None:
        dw.copy_((g * xhat).reshape(-1, x.shape[-1]).sum(0))
    if db is not None:
        db.copy_(g.reshape(-1, x.shape[-1]).sum(0))
    if weight is not None:
        g = g * _scale(weight, offset)
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if center:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    return (dx if dh is None else dx + dh).to(x.dtype).contiguous()


def _scale(weight: Tensor, offset: float) -> Tensor:
    return weight if offset == 0.0 else weight.to(accumulator(weight.dtype)) + offset
