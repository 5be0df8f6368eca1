"""Sparsemax: the Euclidean projection of the logits onto the probability simplex.

    y = max(0, z - τ)  with τ such that Σ y = 1          dz = 1[y > 0] (g - Σ_S g / |S|), S the classes with y > 0

Source: Martins and Astudillo (arXiv:1602.02068). Axes: N rows, V classes.

One program holds a row in registers. The threshold τ is found by Newton's method, without sorting: with S the classes
above τ, the next τ is (Σ_S z - 1) / |S|, starting from S = all classes. τ increases, never exceeds the solution, and is
exact once S no longer changes: after at most V steps, about ten for real logits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import DTYPES, accumulator, as_rows, describe, has_dtype, launch, takes_kernel
from ._operator import Operator, is_recorded, is_transformed, operator

# Longest row that a program holds in registers.
_MOST_CLASSES = 65536
_ELEMENTS_PER_WARP = 2048


@triton.jit
def sparsemax_fwd_kernel(p_z, p_y, stride_z, V: tl.constexpr, BLOCK: tl.constexpr):
    """y of one row."""
    i_n = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    m_v = o_v < V
    b_z = tl.load(p_z + i_n * stride_z + o_v, mask=m_v, other=-float("inf")).to(tl.float32)
    # Relative to the maximum, sums are accurate, and τ >= -1.
    b_z -= tl.max(b_z, 0)
    b_z = tl.where(m_v, b_z, -float("inf"))
    m_s = b_z > -1.0
    count = tl.sum(m_s.to(tl.int32), 0)
    # IEEE division, so that a class exactly at the threshold is not above it.
    tau = tl.div_rn(tl.sum(tl.where(m_s, b_z, 0.0), 0) - 1.0, count.to(tl.float32))
    changed = count > 0
    while changed:
        m_s = b_z > tau
        left = tl.sum(m_s.to(tl.int32), 0)
        tau = tl.div_rn(tl.sum(tl.where(m_s, b_z, 0.0), 0) - 1.0, left.to(tl.float32))
        changed = left < count
        count = left
    b_y = tl.where(b_z > tau, b_z - tau, 0.0)
    tl.store(p_y + i_n * V + o_v, b_y.to(p_y.dtype.element_ty), mask=m_v)


@triton.jit
def sparsemax_bwd_kernel(p_y, p_dy, p_dz, stride_dy, V: tl.constexpr, BLOCK: tl.constexpr):
    """dz of one row."""
    i_n = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    m_v = o_v < V
    m_s = tl.load(p_y + i_n * V + o_v, mask=m_v, other=0.0).to(tl.float32) > 0.0
    b_g = tl.load(p_dy + i_n * stride_dy + o_v, mask=m_v, other=0.0).to(tl.float32)
    count = tl.maximum(tl.sum(m_s.to(tl.int32), 0), 1).to(tl.float32)
    mean = tl.sum(tl.where(m_s, b_g, 0.0), 0) / count
    b_dz = tl.where(m_s, b_g - mean, 0.0)
    tl.store(p_dz + i_n * V + o_v, b_dz.to(p_dz.dtype.element_ty), mask=m_v)


def _constexprs(width: int) -> dict[str, Any]:
    block = max(triton.next_power_of_2(width), 128)
    return {"V": width, "BLOCK": block, "num_warps": min(max(block // _ELEMENTS_PER_WARP, 1), 32)}


def sparsemax_reference(z: Tensor) -> Tensor:
    """`sparsemax` by sorting, in plain PyTorch, differentiable by autograd and `torch.func`."""
    wide = z.to(accumulator(z.dtype))
    wide = wide - wide.amax(-1, keepdim=True).detach()
    ordered = wide.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=wide.dtype)
    inside = 1 + rank * ordered > ordered.cumsum(-1)
    count = inside.sum(-1, keepdim=True)
    tau = (ordered.where(inside, 0.0).sum(-1, keepdim=True) - 1) / count
    return (wide - tau).clamp_min(0).to(z.dtype)


@operator("sparsemax_bwd(Tensor dy, Tensor y) -> Tensor")
class _Backward(Operator):
    """dz from dy and y."""

    @staticmethod
    def forward(dy: Tensor, y: Tensor) -> Tensor:
        width = y.shape[-1]
        if takes_kernel(y) and width <= _MOST_CLASSES:
            dz, incoming = y.new_empty(y.shape), as_rows(dy)
            launch(
                sparsemax_bwd_kernel, (incoming.shape[0],), y, incoming, dz, incoming.stride(0), **_constexprs(width)
            )
            return dz
        inside, wide = y > 0, dy.to(accumulator(y.dtype))
        mean = wide.where(inside, 0.0).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(inside, wide - mean, 0.0).to(y.dtype).contiguous()

    @staticmethod
    def fake(dy: Tensor, y: Tensor) -> Tensor:
        return y.new_empty(y.shape)


@operator("sparsemax(Tensor z) -> Tensor")
class _Sparsemax(Operator):
    """max(0, z - τ) of each row."""

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        width = z.shape[-1]
        if not takes_kernel(z) or width > _MOST_CLASSES:
            return sparsemax_reference(z).contiguous()
        y, rows = z.new_empty(z.shape), as_rows(z)
        launch(sparsemax_fwd_kernel, (rows.shape[0],), rows, y, rows.stride(0), **_constexprs(width))
        return y

    @staticmethod
    def fake(z: Tensor) -> Tensor:
        return z.new_empty(z.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if is_recorded():
            # The gradient is linear in dy; its derivative is plain PyTorch.
            inside = y > 0
            mean = dy.where(inside, 0.0).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
            return torch.where(inside, dy - mean, 0.0)
        found: Tensor = _Backward.apply(dy, y)
        return found


def sparsemax(z: Tensor) -> Tensor:
    """Sparsemax over the last axis: probabilities, most of which are exactly zero.

    Equivalent to::

        ordered, rank = z.sort(-1, descending=True).values, torch.arange(1, V + 1)
        inside = 1 + rank * ordered > ordered.cumsum(-1)
        tau = ((ordered * inside).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
        y = (z - tau).clamp(min=0)

    Args:
        z: [..., V], bf16 | fp16 | fp32 | fp64, any strides. fp64 and V > 65536 run in plain PyTorch.

    Returns:
        Same shape and dtype as z. Undefined for a row with a NaN, or without a finite logit.

    Raises:
        ValueError: a wrong shape or dtype.

    Example:
        >>> sparsemax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.6000, 0.4000, 0.0000])
    """
    if not has_dtype(z) or z.dim() == 0 or z.shape[-1] == 0:
        raise ValueError(f"z must be {DTYPES} of shape [..., V] with V > 0, got {describe(z)}")
    if is_transformed():
        return sparsemax_reference(z)
    found: Tensor = _Sparsemax.apply(z)
    return found
