"""Softmax over the last axis.

    y = exp(z - max z) / Σ exp(z - max z)          dz = y (dy - Σ dy y)

Axes: N rows, V classes. A program holds a row of up to 65536 classes, or several narrow rows, in registers; wider rows
are read twice, in forward with a running maximum (Milakov and Gimelshein, arXiv:1805.02867).

Minimum bytes moved per element: forward 2·itemsize, backward 3·itemsize.
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

# Classes of the widest row that a program holds, and of a block of wider rows.
_MOST_CLASSES, _PART = 65536, 16384
# Elements per program: several narrow rows, or one row.
_TILE = 4096
_ELEMENTS_PER_WARP = 1024


@triton.jit
def _load(p_x, o_r, stride, o_v, m, OTHER: tl.constexpr):
    return tl.load(p_x + o_r[:, None] * stride + o_v[None, :], mask=m, other=OTHER).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def softmax_fwd_kernel(p_z, p_y, n_rows, stride_z, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y of ROWS rows."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = (o_r < n_rows)[:, None]
    o_v = tl.arange(0, BLOCK)
    if V <= BLOCK:
        m = m_r & (o_v < V)[None, :]
        b_z = _load(p_z, o_r, stride_z, o_v, m, -float("inf"))
        # Rows beyond the last are -inf: subtract 0, not their maximum.
        b_exp = tl.exp(b_z - tl.where(m_r, tl.max(b_z, 1)[:, None], 0.0))
        b_y = b_exp / tl.where(m_r, tl.sum(b_exp, 1)[:, None], 1.0)
        tl.store(p_y + o_r[:, None] * V + o_v[None, :], b_y.to(p_y.dtype.element_ty), mask=m)
    else:
        b_max = tl.full([ROWS], -float("inf"), tl.float32)
        b_sum = tl.zeros([ROWS], tl.float32)
        for i_v in range(0, V, BLOCK):
            m = m_r & (i_v + o_v < V)[None, :]
            b_z = _load(p_z, o_r, stride_z, i_v + o_v, m, -float("inf"))
            b_next = tl.maximum(b_max, tl.max(b_z, 1))
            # If all logits so far are -inf, subtract 0.
            b_shift = tl.where(b_next == -float("inf"), 0.0, b_next)
            b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_z - b_shift[:, None]), 1)
            b_max = b_next
        for i_v in range(0, V, BLOCK):
            m = m_r & (i_v + o_v < V)[None, :]
            b_z = _load(p_z, o_r, stride_z, i_v + o_v, m, -float("inf"))
            b_y = tl.exp(b_z - b_max[:, None]) / b_sum[:, None]
            tl.store(p_y + o_r[:, None] * V + i_v + o_v[None, :], b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def softmax_bwd_kernel(p_y, p_dy, p_dz, n_rows, stride_dy, V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dz of ROWS rows."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = (o_r < n_rows)[:, None]
    o_v = tl.arange(0, BLOCK)
    if V <= BLOCK:
        m = m_r & (o_v < V)[None, :]
        b_y = _load(p_y, o_r, V, o_v, m, 0.0)
        b_dy = _load(p_dy, o_r, stride_dy, o_v, m, 0.0)
        b_dz = b_y * (b_dy - tl.sum(b_dy * b_y, 1)[:, None])
        tl.store(p_dz + o_r[:, None] * V + o_v[None, :], b_dz.to(p_dz.dtype.element_ty), mask=m)
    else:
        b_sum = tl.zeros([ROWS], tl.float32)
        for i_v in range(0, V, BLOCK):
            m = m_r & (i_v + o_v < V)[None, :]
            b_y = _load(p_y, o_r, V, i_v + o_v, m, 0.0)
            b_sum += tl.sum(b_y * _load(p_dy, o_r, stride_dy, i_v + o_v, m, 0.0), 1)
        for i_v in range(0, V, BLOCK):
            m = m_r & (i_v + o_v < V)[None, :]
            b_y = _load(p_y, o_r, V, i_v + o_v, m, 0.0)
            b_dz = b_y * (_load(p_dy, o_r, stride_dy, i_v + o_v, m, 0.0) - b_sum[:, None])
            tl.store(p_dz + o_r[:, None] * V + i_v + o_v[None, :], b_dz.to(p_dz.dtype.element_ty), mask=m)


def _plan(n_rows: int, width: int) -> tuple[int, dict[str, Any]]:
    """(number of programs, constexprs)."""
    block = triton.next_power_of_2(width) if width <= _MOST_CLASSES else _PART
    rows = max(_TILE // block, 1)
    warps = min(max(rows * block // _ELEMENTS_PER_WARP, 1), 32)
    return triton.cdiv(n_rows, rows), {"V": width, "ROWS": rows, "BLOCK": block, "num_warps": warps}


@operator("softmax_bwd(Tensor dy, Tensor y) -> Tensor")
class _Backward(Operator):
    """dz from dy and y."""

    @staticmethod
    def forward(dy: Tensor, y: Tensor) -> Tensor:
        if not takes_kernel(y):
            return _gradient(dy.to(accumulator(y.dtype)), y.to(accumulator(y.dtype))).to(y.dtype).contiguous()
        dz, incoming = y.new_empty(y.shape), as_rows(dy)
        programs, constexprs = _plan(incoming.shape[0], y.shape[-1])
        launch(softmax_bwd_kernel, (programs,), y, incoming, dz, incoming.shape[0], incoming.stride(0), **constexprs)
        return dz

    @staticmethod
    def fake(dy: Tensor, y: Tensor) -> Tensor:
        return y.new_empty(y.shape)


def _gradient(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))


@operator("softmax(Tensor z) -> Tensor")
class _Softmax(Operator):
    """The probabilities of each row."""

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        if not takes_kernel(z):
            return torch.softmax(z, -1).contiguous()
        y, rows = z.new_empty(z.shape), as_rows(z)
        programs, constexprs = _plan(rows.shape[0], z.shape[-1])
        launch(softmax_fwd_kernel, (programs,), rows, y, rows.shape[0], rows.stride(0), **constexprs)
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
            # y is an output of this node, so this is differentiable with respect to z.
            return _gradient(dy, y)
        found: Tensor = _Backward.apply(dy, y)
        return found


def softmax(z: Tensor) -> Tensor:
    """`torch.softmax(z, -1)`, computed in fp32 and rounded once. Under `torch.func`, plain PyTorch.

    Args:
        z: [..., V], bf16 | fp16 | fp32 (fp64 in plain PyTorch), any strides.

    Returns:
        Same shape and dtype as z, contiguous. A row of -inf gives NaN, as in PyTorch.

    Raises:
        ValueError: a wrong shape or dtype.

    Example:
        >>> softmax(torch.tensor([0.0, 0.0]))
        tensor([0.5000, 0.5000])
    """
    if not has_dtype(z) or z.dim() == 0 or z.shape[-1] == 0:
        raise ValueError(f"z must be {DTYPES} of shape [..., V] with V > 0, got {describe(z)}")
    if is_transformed():
        return torch.softmax(z, -1)
    found: Tensor = _Softmax.apply(z)
    return found
