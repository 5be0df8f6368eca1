"""What the kernels of `rope` and `qk_norm_rope` share: where the pairs and the angles of a rotation are.

A rotation turns P pairs of features, the first R = 2·P of the D features of a head:

    y1 = x1 · cos - x2 · sin        y2 = x2 · cos + x1 · sin

Pair p is features (p, p + P), as in "rotate half", or interleaved, (2p, 2p + 1). Features from R on pass through;
kernels take those in pairs, too, since pairs are what a thread holds.

Angles come one per pair, each twice (as the convention itself repeats them) or complex. They may be a table of which
`positions` names the rows. With M-RoPE there are three of each, for positions in time, height and width, and a pair
takes the one of its section.

Tiles are [N, W]: N starting points (a column) times W pairs from there on. Axes: B batch, S positions, H heads.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_rows(o_row, n_s, heads_adjacent, HEADS: tl.constexpr):
    """Positions and heads of the rows o_row of HEADS heads, and which of them exist, as columns.

    heads_adjacent: whether rows of one position follow each other, or those of one head: as they lie in memory.
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
    """p_q where m, else p_k; both multiples of VEC elements, which the compiler does not see through the choice."""
    BYTES: tl.constexpr = VEC * p_q.dtype.scalar.element_ty.primitive_bitwidth // 8
    return tl.multiple_of(tl.where(m, p_q, p_k), [BYTES, BYTES])


@triton.jit
def point_at_rows(
    p_q, p_k, o_s, o_h, stride_qs, stride_qh, stride_ks, stride_kh, H: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Pointers to rows of q and, from head H on, of k."""
    p_q += o_s * stride_qs + o_h * stride_qh
    p_k += o_s * stride_ks + (o_h - H) * stride_kh
    return choose(o_h < H, p_q, p_k, VEC)


@triton.jit
def _offsets(o_p, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VEC: tl.constexpr):
    """Offsets in a row of the first and the second features of W pairs from o_p on, not interleaved.

    VEC: so many pairs lie side by side; the compiler does not see it through the selection.
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
    """x1 and x2 of W pairs from o_p on in the rows that p_x points at, both columns, in fp32."""
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
    """The reverse of `load_pairs`."""
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


@triton.jit
def _section(o_p, TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr):
    """Which of the three angles pair o_p takes: sections one after the other, or woven: t h w t h w … t t t."""
    if WOVEN:
        o_a = o_p % 3
        o_a = tl.where(o_p < 3 * tl.where(o_a == 1, HEIGHT, WIDTH), o_a, 0)
    else:
        o_a = (o_p >= TIME).to(tl.int32) + (o_p >= TIME + HEIGHT).to(tl.int32)
    return o_a


@triton.jit
def load_angles(
    p_cos, p_sin, p_pos, i_b, o_s, o_p, m, n_angles, stride_cb, stride_ca, stride_cs, stride_pb, stride_ps,
    N: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, FORM: tl.constexpr,
    TIME: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WOVEN: tl.constexpr,
):  # fmt: skip
    """cos and sin of W pairs from o_p on at the positions o_s, in fp32; 0 where m is not set and from PAIRS on.

    A position that the table does not have gives NaN.
    """
    m_a = m
    if p_pos is not None:
        o_s = tl.load(p_pos + i_b * stride_pb + o_s * stride_ps, mask=m, other=0).to(tl.int64)
        m_a = m & (o_s >= 0) & (o_s < n_angles)
    if FORM == "pairs":
        o = o_p + tl.arange(0, W)[None, :]
        o_pair = o
    else:
        o = 2 * o_p + tl.arange(0, 2 * W)[None, :]
        o_pair = o // 2
    o += i_b * stride_cb + o_s * stride_cs
    if TIME > 0:
        o += _section(o_pair, TIME, HEIGHT, WIDTH, WOVEN).to(tl.int64) * stride_ca
    # Where W divides PAIRS, no W pairs lie on both sides of it, and a column of the mask is enough.
    if PAIRS % W == 0:
        o_pair = o_p
    m_l = m_a & (o_pair < PAIRS)
    b_cos = tl.load(p_cos + o, mask=m_l, other=0.0)
    if FORM == "complex":
        b_cos, b_sin = tl.split(tl.reshape(b_cos, N, W, 2))
    elif FORM == "twice":
        b_cos, _ = tl.split(tl.reshape(b_cos, N, W, 2))
        b_sin, _ = tl.split(tl.reshape(tl.load(p_sin + o, mask=m_l, other=0.0), N, W, 2))
    else:
        b_sin = tl.load(p_sin + o, mask=m_l, other=0.0)
    b_cos = b_cos.to(tl.float32)
    if p_pos is not None:
        b_cos = tl.where(m & (m_a == 0), float("nan"), b_cos)
    return b_cos, b_sin.to(tl.float32)


@triton.jit
def rotate(
    b_x1, b_x2, b_cos, b_sin, o_p, W: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, INVERSE: tl.constexpr
):
    """Pairs from o_p on turned by the angles, or back; those from PAIRS on as they are."""
    if INVERSE:
        b_sin = -b_sin
    b_y1 = b_x1 * b_cos - b_x2 * b_sin
    b_y2 = b_x2 * b_cos + b_x1 * b_sin
    if REST > 0:
        m = o_p + tl.arange(0, W)[None, :] < PAIRS
        b_y1 = tl.where(m, b_y1, b_x1)
        b_y2 = tl.where(m, b_y2, b_x2)
    return b_y1, b_y2
