"""The two products of an adapter's gradient with a wide one, in one pass over it.

    e = scale · dy · B          dB = scale · dyᵀ · h

Both sum over an axis of dy: a program has a part of each sum, over its columns and over its rows, and a second kernel
adds the parts in a fixed order. cuBLAS reads dy twice.

Axes: T rows, N columns, R rank. A program takes TB rows, BT at a time, of BN columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch, takes_kernel
from .low_rank import SMALLEST


@dataclass(frozen=True)
class Launch:
    """Rows and columns of a program, rows at a time, elements that a program adds, warps."""

    rows: int = 0
    columns: int = 0
    step: int = 0
    block: int = 0
    warps: int = 8


_PRODUCTS = Launch(rows=512, columns=256, step=64)
_SUMS = Launch(block=1024, warps=4)
_LARGEST = 16


@triton.jit(do_not_specialize=["n_rows", "rank"])
def low_rank_gradients_kernel(
    p_dy, p_h, p_b, p_e, p_db, n_rows, n_cols, stride_h, rank,
    R: tl.constexpr, TB: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Parts of e, [N / BN, T, R], and of dB, [T / TB, N, R]. B is dense, rows of dy and h are apart."""
    i_n, i_t = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    o_r = tl.arange(0, R)
    m_n, m_r = o_n < n_cols, o_r < rank
    b_b = tl.load(p_b + o_n[:, None] * rank + o_r[None, :], mask=m_n[:, None] & m_r[None, :], other=0.0)
    b_db = tl.zeros((BN, R), tl.float32)
    for i in tl.range(0, TB, BT):
        o_t = i_t.to(tl.int64) * TB + i + tl.arange(0, BT)
        m_t = o_t < n_rows
        b_dy = tl.load(p_dy + o_t[:, None] * n_cols + o_n[None, :], mask=m_t[:, None] & m_n[None, :], other=0.0)
        b_h = tl.load(p_h + o_t[:, None] * stride_h + o_r[None, :], mask=m_t[:, None] & m_r[None, :], other=0.0)
        b_db = tl.dot(tl.trans(b_dy), b_h, b_db)
        o_e = (i_n.to(tl.int64) * n_rows + o_t)[:, None] * rank + o_r[None, :]
        tl.store(p_e + o_e, tl.dot(b_dy, b_b), mask=m_t[:, None] & m_r[None, :])
    o_db = (i_t.to(tl.int64) * n_cols + o_n)[:, None] * rank + o_r[None, :]
    tl.store(p_db + o_db, b_db, mask=m_n[:, None] & m_r[None, :])


@triton.jit(do_not_specialize=["n_parts", "n"])
def add_parts_kernel(p_x, p_y, n_parts, n, rank, stride_y, scale, BLOCK: tl.constexpr):
    """y = scale · Σ x, x: [parts, n], dense; rows of y, of `rank` elements, are apart."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o_x < n
    b_y = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.range(0, n_parts):
        b_y += tl.load(p_x + o_x, mask=m, other=0.0)
        p_x += n
    o_y = o_x // rank * stride_y + o_x % rank
    tl.store(p_y + o_y, (b_y * scale).to(p_y.dtype.element_ty), mask=m)


def low_rank_gradients(dy: Tensor, h: Tensor, b: Tensor, scale: float, e: Tensor) -> Tensor:
    """`e.copy_(scale * dy @ b)`; returns `scale * dy.T @ h`, [N, R].

    Args:
        dy: [T, N], bf16 | fp16 | fp32 | fp64.
        h: [T, R], adjacent columns, in the dtype of dy.
        b: [N, R], contiguous, in the dtype of dy.
        e: [T, R], adjacent columns, in the dtype of dy. It is written to.
    """
    n_rows, n_cols = dy.shape
    rank = h.shape[1]
    d_b = b.new_empty(b.shape)
    fused = takes_kernel(dy) and dy.element_size() == 2 and rank <= _LARGEST and dy.is_contiguous() and dy.numel() > 0
    if not fused or not b.is_contiguous():
        torch.addmm(e, dy, b, beta=0, alpha=scale, out=e)
        return torch.addmm(d_b, dy.t(), h, beta=0, alpha=scale, out=d_b)
    across, down = -(-n_cols // _PRODUCTS.columns), -(-n_rows // _PRODUCTS.rows)
    parts_e = dy.new_empty(across, n_rows, rank, dtype=torch.float32)
    parts_b = dy.new_empty(down, n_cols, rank, dtype=torch.float32)
    launch(
        low_rank_gradients_kernel, (across, down), dy, h, b, parts_e, parts_b, n_rows, n_cols, h.stride(0), rank,
        R=SMALLEST, TB=_PRODUCTS.rows, BT=_PRODUCTS.step, BN=_PRODUCTS.columns, num_warps=_PRODUCTS.warps,
    )  # fmt: skip
    for parts, y in ((parts_e, e), (parts_b, d_b)):
        n = parts[0].numel()
        launch(
            add_parts_kernel, (-(-n // _SUMS.block),), parts, y, parts.shape[0], n, rank, y.stride(0), float(scale),
            BLOCK=_SUMS.block, num_warps=_SUMS.warps,
        )  # fmt: skip
    return d_b
