"""Add a low-rank product to a matrix in place: `y += scale · h · b`.

For a small rank, traffic of y dominates: 4 bytes per 16-bit element. For 8192 x 14336 and rank 16 on an H200, cuBLAS
with beta=1 reaches 2.4 TB/s, the kernel 4.1 TB/s.

Axes: T rows, N columns, R rank; tiles of BT x BN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch, takes_kernel


@dataclass(frozen=True)
class Launch:
    """Launch parameters: rows and columns of a tile, warps."""

    rows: int
    columns: int
    warps: int


_LAUNCH = Launch(rows=32, columns=128, warps=4)
# Larger ranks are compute-bound; `tl.dot` needs at least 16.
LARGEST, SMALLEST = 64, 16


@triton.jit(do_not_specialize=["n_rows", "rank"])
def add_low_rank_kernel(
    p_y, p_u, p_v, p_h, p_b, n_rows, n_cols, s_h, s_br, s_bn, rank, scale,
    R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of y; y and the optional addends u and v are contiguous."""
    i_n, i_t = tl.program_id(0), tl.program_id(1)
    o_t = i_t.to(tl.int64) * BT + tl.arange(0, BT)
    o_n = i_n * BN + tl.arange(0, BN)
    o_r = tl.arange(0, R)
    m_t, m_n, m_r = o_t < n_rows, o_n < n_cols, o_r < rank
    m = m_t[:, None] & m_n[None, :]
    o_y = o_t[:, None] * n_cols + o_n[None, :]
    b_y = tl.load(p_y + o_y, mask=m, other=0.0).to(tl.float32)
    if p_u is not None:
        b_y += tl.load(p_u + o_y, mask=m, other=0.0).to(tl.float32)
    if p_v is not None:
        b_y += tl.load(p_v + o_y, mask=m, other=0.0).to(tl.float32)
    b_h = tl.load(p_h + o_t[:, None] * s_h + o_r[None, :], mask=m_t[:, None] & m_r[None, :], other=0.0)
    b_b = tl.load(p_b + o_r[:, None] * s_br + o_n[None, :] * s_bn, mask=m_r[:, None] & m_n[None, :], other=0.0)
    b_y += scale * tl.dot(b_h, b_b)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m)


def add_low_rank(y: Tensor, h: Tensor, b: Tensor, scale: float = 1.0, others: Sequence[Tensor] = ()) -> Tensor:
    """`y.add_(sum(others)).addmm_(h, b, alpha=scale)`, rounded once. Returns y.

    Args:
        y: [T, N], contiguous, bf16 | fp16 | fp32 | fp64; overwritten.
        h: [T, R], column stride 1, y's dtype.
        b: [R, N], any strides, y's dtype.
        others: at most two tensors like y.
    """
    rank = h.shape[1]
    if not takes_kernel(y) or y.element_size() != 2 or rank > LARGEST or y.numel() == 0:
        for other in others:
            y.add_(other)
        return y.addmm_(h, b, alpha=scale)
    n_rows, n_cols = y.shape
    u, v = (*others, None, None)[:2]
    launch(
        add_low_rank_kernel, (-(-n_cols // _LAUNCH.columns), -(-n_rows // _LAUNCH.rows)),
        y, u, v, h, b, n_rows, n_cols, h.stride(0), b.stride(0), b.stride(1), rank, float(scale),
        R=max(SMALLEST, triton.next_power_of_2(rank)), BT=_LAUNCH.rows, BN=_LAUNCH.columns, num_warps=_LAUNCH.warps,
    )  # fmt: skip
    return y
