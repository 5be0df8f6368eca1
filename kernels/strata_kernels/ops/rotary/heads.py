"""Layouts of q and k, and addressing of their rows and feature pairs in kernels.

Axes: B batch, S positions, H heads, D features of a head. A row is one head at one position. Kernels work on tiles
[N, W]: N rows, W pairs of each; the first pair of each row is a column [N, 1]. Pair p is features (p, p + P) of the
first 2·P, or (2p, 2p + 1) if interleaved. Features from 2·P on are loaded as pairs too, because a thread holds pairs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype

Layout = Literal["bhsd", "bshd", "thd"]
_SHAPES = {"bhsd": "[B, H, S, D]", "bshd": "[B, S, H, D]", "thd": "[T, H, D]"}


@triton.jit
def find_rows(o_row, n_s, heads_adjacent, HEADS: tl.constexpr):
    """(positions, heads, mask) of rows o_row, each [N, 1].

    heads_adjacent: whether consecutive rows are the heads of one position, or the positions of one head.
    """
    if heads_adjacent != 0:
        o_s = o_row // HEADS
        o_h = o_row % HEADS
    else:
        o_s = o_row % n_s
        o_h = o_row // n_s
    return o_s.to(tl.int64)[:, None], o_h.to(tl.int64)[:, None], ((o_s < n_s) & (o_h < HEADS))[:, None]


@triton.jit
def choose(m, p_q, p_k, VEC: tl.constexpr):
    """`where(m, p_q, p_k)`, both multiples of VEC elements, which the compiler does not infer for a select."""
    BYTES: tl.constexpr = VEC * p_q.dtype.scalar.element_ty.primitive_bitwidth // 8
    return tl.multiple_of(tl.where(m, p_q, p_k), [BYTES, BYTES])


@triton.jit
def point_at_rows(
    p_q, p_k, o_s, o_h, stride_qs, stride_qh, stride_ks, stride_kh, H: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Pointers to rows of q for heads < H, else of k."""
    p_q += o_s * stride_qs + o_h * stride_qh
    p_k += o_s * stride_ks + (o_h - H) * stride_kh
    return choose(o_h < H, p_q, p_k, VEC)


@triton.jit
def _offsets(o_p, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr):
    """Offsets in a row of the first and second features of W non-interleaved pairs starting at o_p.

    VEC: contiguity of the pairs, which the compiler does not infer for a select.
    """
    o_p = o_p + tl.arange(0, W)[None, :]
    if REST == 0:
        o_1 = o_p
        o_2 = o_p + PAIRS
    else:
        o_1 = tl.where(o_p < PAIRS, o_p, o_p + PAIRS)
        o_2 = tl.where(o_p < PAIRS, o_p + PAIRS, o_p + (PAIRS + REST))
        o_1 = tl.max_contiguous(tl.multiple_of(o_1, [1, VEC]), [1, VEC])
        o_2 = tl.max_contiguous(tl.multiple_of(o_2, [1, VEC]), [1, VEC])
    return o_1, o_2


@triton.jit
def load_pairs(
    p_x, o_p, m, N: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x1 and x2 [N, W], fp32, of W pairs starting at o_p [N, 1] in the rows p_x [N, 1]."""
    if INTERLEAVED:
        o = 2 * o_p + tl.arange(0, 2 * W)[None, :]
        if (PAIRS + REST) % W != 0:
            m = m & (o < 2 * (PAIRS + REST))
        b_x1, b_x2 = tl.split(tl.reshape(tl.load(p_x + o, mask=m, other=0.0), N, W, 2))
    else:
        o_1, o_2 = _offsets(o_p, W, PAIRS, REST, VEC)
        if (PAIRS + REST) % W != 0:
            m = m & (o_p + tl.arange(0, W)[None, :] < PAIRS + REST)
        b_x1 = tl.load(p_x + o_1, mask=m, other=0.0)
        b_x2 = tl.load(p_x + o_2, mask=m, other=0.0)
    return b_x1.to(tl.float32), b_x2.to(tl.float32)


@triton.jit
def store_pairs(
    p_y, b_y1, b_y2, o_p, m, N: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    VEC: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store b_y1 and b_y2 as `load_pairs` loads x1 and x2."""
    b_y1 = b_y1.to(p_y.dtype.element_ty)
    b_y2 = b_y2.to(p_y.dtype.element_ty)
    if INTERLEAVED:
        o = 2 * o_p + tl.arange(0, 2 * W)[None, :]
        if (PAIRS + REST) % W != 0:
            m = m & (o < 2 * (PAIRS + REST))
        tl.store(p_y + o, tl.reshape(tl.join(b_y1, b_y2), N, 2 * W), mask=m)
    else:
        o_1, o_2 = _offsets(o_p, W, PAIRS, REST, VEC)
        if (PAIRS + REST) % W != 0:
            m = m & (o_p + tl.arange(0, W)[None, :] < PAIRS + REST)
        tl.store(p_y + o_1, b_y1, mask=m)
        tl.store(p_y + o_2, b_y2, mask=m)


def empty_heads_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.empty_like(x, dtype=dtype)` for x: [B, H, S, D], but contiguous unless its feature stride is 1, as
    kernels require.
    """
    y = torch.empty_like(x, dtype=dtype)
    return y if y.stride(-1) == 1 else torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def copy_to_layout_of(x: Tensor, y: Tensor) -> Tensor:
    """A copy of y in the layout of a kernel's result for x."""
    return empty_heads_like(x, y.dtype).copy_(y)


def alignment(x: Tensor) -> int:
    """Alignment of all rows of x, in elements: the gcd of its address and its strides."""
    strides = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    return math.gcd(x.data_ptr() // x.element_size(), *strides)


def heads_adjacent(x: Tensor) -> int:
    """1 if the head stride of x: [B, H, S, D] is smaller than its position stride, else 0."""
    return int(x.stride(1) <= x.stride(2))


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, position and head of each tensor [B, H, S, D], whose feature stride must be 1."""
    assert all(x.stride(3) == 1 or x.numel() == 0 for x in tensors), [x.stride() for x in tensors]
    return tuple(x.stride(axis) for x in tensors for axis in (0, 2, 1))


def count_tiles(n_rows: int, per_row: int, size: int) -> int:
    """Number of tiles of `size` elements in n_rows rows of per_row elements, of one batch element."""
    # Kernels compute 32-bit indices up to the end of the last tile.
    if n_rows * per_row + size >= 2**31:
        raise ValueError(f"{n_rows} heads x positions per batch element are too many for a 32-bit index: split it")
    return -(-n_rows * per_row // size)


def dense_features(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its feature stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_bhsd(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of q and k (or results) as [B, H, S, D]."""
    if layout == "bshd":
        return tuple(x.transpose(1, 2) for x in tensors)
    return tuple(x.transpose(0, 1)[None] for x in tensors) if layout == "thd" else tensors


def from_bhsd(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `as_bhsd`."""
    return tuple(x[0].transpose(0, 1) for x in tensors) if layout == "thd" else as_bhsd(layout, *tensors)


def check_heads(q: Tensor, k: Tensor, layout: Layout) -> None:
    """Raise ValueError unless q and k match the layout and each other."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    axes = len(layout)
    if q.dim() != axes or k.dim() != axes:
        raise ValueError(f"q and k must be {_SHAPES[layout]} ({layout}), got {describe(q)} and {describe(k)}")
    heads = layout.index("h")
    same_sizes = all(q.shape[i] == k.shape[i] for i in range(axes) if i != heads)
    if not same_sizes or q.dtype != k.dtype or not has_dtype(q):
        raise ValueError(
            f"q and k must be {DTYPES} and differ only in the number of heads, got {describe(q)} and {describe(k)}"
        )
    if q.shape[-1] % 2 or q.shape[-1] == 0:
        raise ValueError(f"heads must have an even number of features, got {describe(q)}")
    if q.device != k.device:
        raise ValueError(f"q is on {q.device} and k on {k.device}: move one of them")
