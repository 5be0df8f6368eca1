"""Casts to FP8 with a scale taken from the values themselves: four kernels for the two scalings, and one
that transposes what was cast.

    s   = F / max(|x|)              one for the tensor, or one for each row and one for each column
    x8  = fp8(s · x)                x8ᵀ = fp8(s · x)ᵀ           F: the format's largest number, 448 or 57344

A product on a Hopper chip reads both factors along the dimension that is summed, so a tensor of which two products are
made is needed both ways. One pass writes both of 16-bit values: x is read twice in all, once for the maximum. Rounded
down to a power of two, a scale only moves exponents (scales of rows and columns).

Magnitudes are compared as integers: bits of absolute values are ordered as the values are, with infinity and NaN above
all. So a value that is not finite makes everything that is computed from the tensor NaN, as in PyTorch, whose maximum
is NaN. Nothing is clamped: s · max(|x|) rounds to F.

Axes: R rows, C columns, in tiles of BR x BC. p_xt has R_PADDED columns, the last of which are zeros.
Bytes per element in bf16: 2 for the maximum, 2 read and 1 written for each direction.
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
    """The scale for these largest magnitudes, and what undoes it."""
    b_max = b_magnitudes.to(tl.float32, bitcast=True)
    # Not tl.maximum, which drops NaN.
    b_max = tl.where(b_max < 1e-12, 1e-12, b_max)
    b_s = tl.div_rn(tl.full(b_max.shape, LARGEST, tl.float32), b_max)
    if POWER:
        b_s = (b_s.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)
        # The bits of a NaN's exponent alone are those of infinity, and of infinity's scale, 0, there is no exponent.
        b_s = tl.where(b_max <= 3.4028234663852886e38, b_s, float("nan"))
    return b_s, tl.div_rn(tl.full(b_s.shape, 1.0, tl.float32), b_s)


@triton.jit
def float8_amax_kernel(p_x, p_amax, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """The largest magnitude of this program's blocks of a dense tensor of n elements."""
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
    """The largest magnitudes of a tile's rows and columns: p_row [tiles across, R], p_col [tiles down, C]."""
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
    """The scales of BLOCK rows or columns, from the magnitudes [parts, n] of their tiles."""
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
    """A tile of x8 and of x8ᵀ; p_y or p_yt is None where it is not asked for.

    PARTS above 0: p_row has so many magnitudes, of which the largest gives the one scale; the first program writes to
    p_inverse what undoes it. PARTS 0: p_row and p_col are the scales of rows and columns.
    """
    # Programs next to each other share rows, whose parts in memory are next to each other.
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
    """The transpose of bytes [R, C], four of them in a word: words [R, w_cols] to words [C, w_rows].

    Words are transposed as a tile, and the bytes of four words by shifts: Triton moves single bytes slowly, and 3.6
    wrongly. R and C are divisible by 4.
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
