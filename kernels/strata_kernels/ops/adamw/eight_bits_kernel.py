"""The kernel of `adamw_8bit_step`; formulas: see `eight_bits.py`.

Axes: elements in memory order, in blocks of 256 that share a scale. A program updates BLOCKS blocks.

The kernel is limited by arithmetic, not memory. So values of codes are gathered from shared memory, magnitudes are
mapped to cells without comparisons (`_place`), and elementary functions are the GPU's approximations, which flush
denormals to zero.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl

from .._approximations import exp2, log2, reciprocal, sqrt
from .eight_bits_codes import BLOCK, CELLS, DECADES, LOG2_5, LOG10_2, NINTHS, TINY
from .step_kernels import _hash, _load, _noise, _round, _store

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_DECADES: tl.constexpr = tl.constexpr(DECADES)
_PER_DECADE: tl.constexpr = tl.constexpr(-LOG2_5)
_LOG10_2: tl.constexpr = tl.constexpr(LOG10_2)
_LOG2_CELLS: tl.constexpr = tl.constexpr(math.log2(CELLS))
_NINTHS: tl.constexpr = tl.constexpr(NINTHS)
_TINY: tl.constexpr = tl.constexpr(TINY)
# 1.5 * 2^23: adding it leaves the nearest integer in the low bits, four times as fast as a conversion on a GPU.
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_MIX_C: tl.constexpr = tl.constexpr(0xD35A2D97)


@triton.jit
def _place(b_x, FIRST: tl.constexpr, FAST: tl.constexpr):
    """b_x in [0, 1] mapped so that rounding to the nearest integer gives the index of the nearest value.

    The first decade has FIRST cells; the first cell has index FIRST. Before 1/2 is subtracted, cell i maps to [i, i +
    1). Three midpoints between neighboring values are not cell boundaries; a steeper line through each maps it to an
    integer.
    """
    # Halfway from 0 to the midpoint of the first cell; lower boundary of the first cell; its upper boundary.
    ZERO: tl.constexpr = 0.5e-7 + 2.25e-7 / FIRST
    BELOW: tl.constexpr = 1e-7 + 1.8e-7 / FIRST
    END: tl.constexpr = 1e-7 + 9e-7 / FIRST
    SLOPE: tl.constexpr = (END - BELOW) / (END - ZERO)
    b_x = tl.maximum(b_x, b_x * SLOPE + END * (1 - SLOPE))
    # At the boundary of two decades either decade is correct: cell indices continue.
    b_sum = log2(b_x, FAST) * _LOG10_2 + (_DECADES - 0.5) + _MAGIC
    # FIRST * 2^decade, index of the decade's first cell. The shift drops the bits of the magic number.
    b_low = ((b_sum.to(tl.int32, bitcast=True) << 23) + ((126 + FIRST) << 23)).to(tl.float32, bitcast=True)
    b_cells = exp2((b_sum - _MAGIC) * _PER_DECADE + (_LOG2_CELLS + (FIRST - 1)), FAST)
    b_i = b_x * b_cells + (b_low * _NINTHS - 0.5)
    # For 1/5 of a cell above a decade's lower boundary, the last midpoint of the decade below is nearest.
    b_i = tl.minimum(b_i, b_i * 1.25 + (b_low * -0.25 - 0.125))
    # Halfway from the last cell's midpoint to 1 is a quarter of a cell below 1.
    LAST: tl.constexpr = 128 * FIRST
    return tl.maximum(b_i, b_i * 3.9 + (3.9 * (0.75 - LAST) + LAST - 0.5))


@triton.jit(do_not_specialize=["n", "first", "word0", "word2"])
def eight_bits_kernel(
    p_w, p_g, p_m, p_v, p_m_scale, p_v_scale, p_r, p_values, n, first, word0, word2, size, inverse, decay, beta1,
    rest1, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Update BLOCKS of n blocks; MASKED: n is not a multiple of BLOCKS.

    p_values: [2, 256], values of the codes of first and second moments. first: index of the first element in the
    unsharded tensor, modulo 2^32. decay: lr * weight_decay. rest1, rest2: 1 - beta1, 1 - beta2.
    """
    MASTER: tl.constexpr = W == "bf16" and ROUNDING == "master"
    SIZE: tl.constexpr = BLOCKS * _BLOCK
    begin = tl.program_id(0).to(tl.int64)
    o_b, o, o_value = begin * BLOCKS + tl.arange(0, BLOCKS), begin * SIZE + tl.arange(0, SIZE), tl.arange(0, _BLOCK)
    m_b, m = o_b < n, o < n.to(tl.int64) * _BLOCK
    b_g = _load(p_g, o, m, G, MASKED)
    b_m_code, b_v_code = _load_bits(p_m, o, m, MASKED), _load_bits(p_v, o, m, MASKED)
    b_m_scale, b_v_scale = _load_bits(p_m_scale, o_b, m_b, MASKED), _load_bits(p_v_scale, o_b, m_b, MASKED)
    # [BLOCKS, 256] from here; flattened again for stores.
    b_g = tl.reshape(b_g, (BLOCKS, _BLOCK))
    b_m = tl.gather(tl.load(p_values + o_value), b_m_code.to(tl.int32), 0)
    b_v = tl.gather(tl.load(p_values + _BLOCK + o_value), b_v_code.to(tl.int32), 0)
    b_m = tl.reshape(b_m, (BLOCKS, _BLOCK)) * (beta1 * b_m_scale)[:, None] + rest1 * b_g
    b_v = tl.reshape(b_v, (BLOCKS, _BLOCK)) * b_v_scale[:, None]
    b_v += rest2 * (b_g * b_g - b_v)

    b_m_scale, b_v_scale = tl.max(tl.abs(b_m), 1), tl.max(b_v, 1)
    _store(p_m_scale, o_b, b_m_scale, m_b, MASKED)
    _store(p_v_scale, o_b, b_v_scale, m_b, MASKED)
    b_x = b_m * reciprocal(tl.maximum(b_m_scale, _TINY), FAST)[:, None]
    b_i = _place(tl.abs(b_x), 1, FAST)
    b_i = (b_i.to(tl.int32, bitcast=True) | (b_x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    # There is one more positive value than negative ones. The bound also gives NaN a valid code.
    b_code = (tl.maximum(b_i, -127.0) + (127.0 + _MAGIC)).to(tl.int32, bitcast=True)
    _store(p_m, o, tl.reshape(b_code.to(tl.uint8), (SIZE,)), m, MASKED)
    b_i = _place(b_v * reciprocal(tl.maximum(b_v_scale, _TINY), FAST)[:, None], 2, FAST)
    b_code = (b_i + (_MAGIC - 1.0)).to(tl.int32, bitcast=True)
    _store(p_v, o, tl.reshape(b_code.to(tl.uint8), (SIZE,)), m, MASKED)

    b_u = tl.reshape(b_m * reciprocal(sqrt(b_v * inverse, FAST) + eps, FAST), (SIZE,))
    b_w = _load(p_w, o, m, W, MASKED)
    if MASTER:
        b_w = (b_w.to(tl.int32, bitcast=True) + _load_bits(p_r, o, m, MASKED).to(tl.int32)).to(tl.float32, bitcast=True)
    b_w -= size * b_u + decay * b_w
    if MASTER:
        b_bits = tl.where(b_w == b_w, b_w.to(tl.int32, bitcast=True), 0x7FC00000)
        _store(p_w, o, ((b_bits + 0x8000) >> 16).to(tl.int16), m, MASKED)
        _store(p_r, o, b_bits.to(tl.int16), m, MASKED)
    else:
        b_noise = _noise(_hash((o + first).to(tl.uint32), word0.to(tl.uint32)), word2.to(tl.uint32), _MIX_C) & 0xFFFF
        _store(p_w, o, _round(b_w, b_noise, W, ROUNDING), m, MASKED)


@triton.jit
def _load_bits(p, o, m, MASKED: tl.constexpr):
    return tl.load(p + o, mask=m, other=0) if MASKED else tl.load(p + o)
