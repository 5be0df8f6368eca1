"""Casts to FP8 with dynamic scales: four kernels for the two scalings, and one that transposes FP8 matrices.

    s   = F / max(|x|)              one for the tensor, or one for each row and one for each column
    x8  = fp8(s · x)                x8ᵀ = fp8(s · x)ᵀ           F: the format's maximum, 448 or 57344

FP8 products on Hopper need both operands contiguous along the reduction dimension, so a tensor that is used in two
products is needed in both layouts. One pass over 16-bit values writes both: x is read twice in all, once for the
maximum. Scales of rows and columns are rounded down to a power of two, so they only change exponents.

Magnitudes are compared as integers: the bits of |x| sort like the values, with infinity and NaN as the largest. So a
non-finite value makes everything computed from the tensor NaN, as PyTorch's maximum does. No clamping is needed:
s · max(|x|) rounds to F.

Axes: R rows, C columns, in tiles of BR x BC. p_xt has R_PADDED columns, zero from R on.
Bytes per element in bf16: 2 read for the maximum; 2 read and 1 written per layout for the cast.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _magnitudes(b_x):
    """The bits of |x|, int32."""
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(b_magnitudes, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """(scale, inverse scale) for maxima given as bits."""
    b_max = b_magnitudes.to(tl.float32, bitcast=True)
    # Not tl.maximum, which does not propagate NaN.
    b_max = tl.where(b_max < 1e-12, 1e-12, b_max)
    b_s = tl.div_rn(tl.full(b_max.shape, LARGEST, tl.float32), b_max)
    if POWER:
        b_s = (b_s.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
        # Masking the mantissa would turn NaN into infinity, and an infinite maximum has scale 0, without a valid
        # exponent.
        b_s = tl.where(b_max <= 3.4028234663852886e38, b_s, float("nan"))
    return b_s, tl.div_rn(tl.full(b_s.shape, 1.0, tl.float32), b_s)


@triton.jit
def float8_amax_kernel(p_x, p_amax, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """max |x| of this program's blocks of a contiguous tensor of n elements."""
    b_max = tl.full((BLOCK,), 0, tl.int32)
    pid = tl.program_id(0).to(tl.int64)
    for start in tl.range(pid * BLOCK, n, PROGRAMS * BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_max = tl.maximum(b_max, _magnitudes(tl.load(p_x + o_x, mask=o_x < n, other=0.0)))
    tl.store(p_amax + pid, tl.max(b_max, axis=0))


@triton.jit(do_not_specialize=["n_rows"])
def float8_amax_both_kernel(
    p_x, p_row, p_col, n_rows, n_cols,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """max |x| of a tile's rows and columns: p_row [tiles along C, R], p_col [tiles along R, C]."""
    i_r, i_c = tl.program_id(0), tl.program_id(1)
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_c = i_c * BC + tl.arange(0, BC)
    m = (o_r < n_rows)[:, None] & (o_c < n_cols)[None, :]
    b_m = _magnitudes(tl.load(p_x + o_r[:, None] * n_cols + o_c[None, :], mask=m, other=0.0))
    if ROWS:
        tl.store(p_row + i_c.to(tl.int64) * n_rows + o_r, tl.max(b_m, axis=1), mask=o_r < n_rows)
    if COLUMNS:
        tl.store(p_col + i_r.to(tl.int64) * n_cols + o_c, tl.max(b_m, axis=0), mask=o_c < n_cols)


@triton.jit(do_not_specialize=["n", "parts"])
def float8_scale_kernel(p_amax, p_s, p_inverse, n, parts, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Scales of BLOCK rows or columns, from the maxima [parts, n] of their tiles."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_max = tl.full((BLOCK,), 0, tl.int32)
    for _ in tl.range(0, parts):
        b_max = tl.maximum(b_max, tl.load(p_amax + o_n, mask=o_n < n, other=0))
        p_amax += n
    b_s, b_inverse = _scale(b_max, LARGEST, True)
    tl.store(p_s + o_n, b_s, mask=o_n < n)
    tl.store(p_inverse + o_n, b_inverse, mask=o_n < n)


@triton.jit(do_not_specialize=["n_rows"])
def float8_cast_kernel(
    p_x, p_y, p_yt, p_row, p_col, p_inverse, n_rows, n_padded, n_cols,
    LARGEST: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of x8 and x8ᵀ; p_y or p_yt is None if not requested.

    PARTS > 0: p_row has PARTS maxima, whose maximum gives the one scale; the first program stores its inverse to
    p_inverse. PARTS = 0: p_row and p_col are the scales of rows and columns.
    """
    # Consecutive programs have consecutive columns of the same rows: contiguous memory.
    i_c, i_r = tl.program_id(0), tl.program_id(1)
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_c = i_c * BC + tl.arange(0, BC)
    m_r, m_c = o_r < n_rows, o_c < n_cols
    m = m_r[:, None] & m_c[None, :]
    b_x = tl.load(p_x + o_r[:, None] * n_cols + o_c[None, :], mask=m, other=0.0)
    if PARTS > 0:
        b_max = tl.max(tl.load(p_row + tl.arange(0, PARTS)), axis=0)
        b_s, b_inverse = _scale(tl.full((1,), 0, tl.int32) + b_max, LARGEST, False)
        if (i_r == 0) & (i_c == 0):
            tl.store(p_inverse + tl.arange(0, 1), b_inverse)
        b_x = b_x.to(tl.float32) * b_s[:, None]
    if p_y is not None:
        b_y = b_x
        if PARTS == 0:
            b_y = b_x.to(tl.float32) * tl.load(p_row + o_r, mask=m_r, other=0.0)[:, None]
        tl.store(p_y + o_r[:, None] * n_cols + o_c[None, :], b_y.to(p_y.dtype.element_ty), mask=m)
    if p_yt is not None:
        b_y = b_x
        if PARTS == 0:
            b_y = b_x.to(tl.float32) * tl.load(p_col + o_c, mask=m_c, other=0.0)[None, :]
        b_yt = tl.trans(b_y.to(p_yt.dtype.element_ty))
        m_t = m_c[:, None] & (o_r < n_padded)[None, :]
        tl.store(p_yt + o_c.to(tl.int64)[:, None] * n_padded + o_r[None, :], b_yt, mask=m_t)


@triton.jit
def float8_transpose_kernel(p_y, p_yt, w_rows, w_cols, BR: tl.constexpr, BC: tl.constexpr):
    """Transpose of bytes [R, C], packed in 4-byte words: words [R, w_cols] to words [C, w_rows].

    A tile of words is transposed, then the bytes within four words by shifts: Triton transposes single bytes slowly,
    and 3.6 incorrectly. R and C are divisible by 4.
    """
    i_c, i_r = tl.program_id(0), tl.program_id(1)
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)
    o_c = i_c.to(tl.int64) * BC + tl.arange(0, BC)
    m = (o_r < w_rows)[:, None] & (o_c < w_cols)[None, :]
    p_w = p_y + o_r[:, None] * 4 * w_cols + o_c[None, :]
    b_0 = tl.load(p_w, mask=m, other=0)
    b_1 = tl.load(p_w + w_cols, mask=m, other=0)
    b_2 = tl.load(p_w + 2 * w_cols, mask=m, other=0)
    b_3 = tl.load(p_w + 3 * w_cols, mask=m, other=0)
    m_t = (o_c < w_cols)[:, None] & (o_r < w_rows)[None, :]
    p_t = p_yt + o_c[:, None] * 4 * w_rows + o_r[None, :]
    for i in tl.static_range(4):
        b_w = ((b_0 >> 8 * i) & 255) | (((b_1 >> 8 * i) & 255) << 8)
        b_w |= (((b_2 >> 8 * i) & 255) << 16) | (((b_3 >> 8 * i) & 255) << 24)
        tl.store(p_t + i * w_rows, tl.trans(b_w), mask=m_t)
