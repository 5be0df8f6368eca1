"""The kernel of `adamw_8bit_step`; `eight_bits.py` has the formulas.

Axes: elements in memory order, blocks of 256 of them that share a scale. A program takes some whole blocks.

Arithmetic, not memory, is what limits this kernel. So the codes' values are gathered from shared memory, a magnitude
finds its cell without a comparison (`_place`), and functions are the GPU's own approximations, which flush denormal
numbers to zero.
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
# 1.5 * 2^23: the sum with it has the nearest integer in its low bits. Conversions take a GPU four times as long.
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_MIX_C: tl.constexpr = tl.constexpr(0xD35A2D97)


@triton.jit
def _place(b_x, FIRST: tl.constexpr, FAST: tl.constexpr):
    """Numbers whose nearest integers are those of the values nearest to b_x in [0, 1], where the first cell is FIRST.

    The first decade has FIRST cells. A cell of number i holds i to i + 1 before 1/2 is taken off. Three borders between
    values are no borders of cells; a line through the border, steeper than the cells are, moves each to an integer.
    """
    # Half-way from 0 to the middle of the first cell; where that lies as if the cell had a neighbor below; the end of
    # the first cell.
    ZERO: tl.constexpr = 0.5e-7 + 2.25e-7 / FIRST
    BELOW: tl.constexpr = 1e-7 + 1.8e-7 / FIRST
    END: tl.constexpr = 1e-7 + 9e-7 / FIRST
    SLOPE: tl.constexpr = (END - BELOW) / (END - ZERO)
    b_x = tl.maximum(b_x, b_x * SLOPE + END * (1 - SLOPE))
    # At the edge of two decades either will do: their cells are numbered on.
    b_sum = log2(b_x, FAST) * _LOG10_2 + (_DECADES - 0.5) + _MAGIC
    # FIRST * 2^decade, the number of the decade's first cell. The shift leaves no bit of the magic number.
    b_low = ((b_sum.to(tl.int32, bitcast=True) << 23) + ((126 + FIRST) << 23)).to(tl.float32, bitcast=True)
    b_cells = exp2((b_sum - _MAGIC) * _PER_DECADE + (_LOG2_CELLS + (FIRST - 1)), FAST)
    b_i = b_x * b_cells + (b_low * _NINTHS - 0.5)
    # Beyond a decade's first edge, the last middle of the decade below is nearest for a fifth of a cell.
    b_i = tl.minimum(b_i, b_i * 1.25 + (b_low * -0.25 - 0.125))
    # Half-way from the last cell's middle to 1 is a quarter of a cell below 1.
    LAST: tl.constexpr = 128 * FIRST
    return tl.maximum(b_i, b_i * 3.9 + (3.9 * (0.75 - LAST) + LAST - 0.5))


@triton.jit(do_not_specialize=["n", "first", "word0", "word2"])
def eight_bits_kernel(
    p_w, p_g, p_m, p_v, p_m_scale, p_v_scale, p_r, p_values, n, first, word0, word2, size, inverse, decay, beta1,
    rest1, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A step of BLOCKS of n blocks; MASKED: the last program has fewer.

    p_values: [2, 256], the values of the codes of first and of second moments. first: the index of the first element
    in the whole tensor, modulo 2^32. decay: lr * weight_decay. rest1, rest2: 1 - beta1, 1 - beta2.
    """
    MASTER: tl.constexpr = W == "bf16" and ROUNDING == "master"
    SIZE: tl.constexpr = BLOCKS * _BLOCK
    begin = tl.program_id(0).to(tl.int64)
    o_b, o, o_value = begin * BLOCKS + tl.arange(0, BLOCKS), begin * SIZE + tl.arange(0, SIZE), tl.arange(0, _BLOCK)
    m_b, m = o_b < n, o < n.to(tl.int64) * _BLOCK
    b_g = _load(p_g, o, m, G, MASKED)
    b_m_code, b_v_code = _load_bits(p_m, o, m, MASKED), _load_bits(p_v, o, m, MASKED)
    b_m_scale, b_v_scale = _load_bits(p_m_scale, o_b, m_b, MASKED), _load_bits(p_v_scale, o_b, m_b, MASKED)
    # [BLOCKS, 256] from here, and flat again where it is stored.
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
    # There is one more value above zero than below. NaN, too, gets a code.
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
