"""The kernel of `adamw_8bit_step`; `eight_bits.py` has the formulas.

Axes: blocks of 256 elements that share a scale, the elements of a block. A program takes some whole blocks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .eight_bits_codes import BLOCK, CELLS, DECADES, LOG2_5, LOG10_2, NINTHS, TINY
from .step_kernels import _hash, _load, _noise, _round, _store

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_CELLS: tl.constexpr = tl.constexpr(CELLS)
_DECADES: tl.constexpr = tl.constexpr(DECADES)
_PER_DECADE: tl.constexpr = tl.constexpr(-LOG2_5)
_LOG10_2: tl.constexpr = tl.constexpr(LOG10_2)
_NINTHS: tl.constexpr = tl.constexpr(NINTHS)
_TINY: tl.constexpr = tl.constexpr(TINY)
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)
_MIX_C: tl.constexpr = tl.constexpr(0xD35A2D97)


@triton.jit
def _cell(b_x, FIRST: tl.constexpr, FAST: tl.constexpr):
    """The number of the cell whose middle is nearest to magnitudes b_x in [0, 1]; the first decade has FIRST cells."""
    if FAST:
        # At the edge of two decades either will do: their cells are numbered on.
        b_log = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_log = tl.log2(tl.maximum(b_x, _TINY))
    # Integers come from the low bits of a sum with 1.5 * 2^23: conversions take a GPU four times as long. Of magnitudes
    # without a decade, the last two lines decide.
    b_sum = b_log * _LOG10_2 + (_DECADES - 0.5) + _MAGIC
    b_low = ((b_sum.to(tl.int32, bitcast=True) - _MAGIC_BITS + (126 + FIRST)) << 23).to(tl.float32, bitcast=True)
    b_cell = b_x * (FIRST * _CELLS) * tl.exp2((b_sum - _MAGIC) * _PER_DECADE) + b_low * _NINTHS
    # Beyond a decade's first edge, the last middle of the decade below is nearest for a fifth of a cell.
    b_cell = tl.where(b_cell < b_low + 0.2, b_low - 0.75, b_cell)
    b_floor = (b_cell - 0.5 + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    b_floor = tl.maximum(b_floor, FIRST) - (FIRST - 1)
    # Half-way from the last cell's middle to 1, and from 0 to the first one's. NaN, too, gets a number.
    b_floor = tl.where(b_x >= 1 - 0.225 / (64 * FIRST), FIRST * 127 + 1, b_floor)
    return tl.where(b_x >= 0.5e-7 + 2.25e-7 / FIRST, b_floor, 0)


@triton.jit(do_not_specialize=["n", "first", "word0", "word2"])
def eight_bits_kernel(
    p_w, p_g, p_m, p_v, p_m_scale, p_v_scale, p_r, p_values, n, first, word0, word2, size, inverse, decay, beta1,
    rest1, rest2, eps,
    W: tl.constexpr, G: tl.constexpr, ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A step of BLOCKS of n blocks.

    p_values: [2, 256], the values of the codes of first and of second moments. first: the index of the first element
    in the whole tensor, modulo 2^32. decay: lr * weight_decay. rest1, rest2: 1 - beta1, 1 - beta2.
    """
    MASTER: tl.constexpr = W == "bf16" and ROUNDING == "master"
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < n
    o = o_b[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    m = m_b[:, None]
    b_g = _load(p_g, o, m, G, True)
    b_m_scale = tl.load(p_m_scale + o_b, mask=m_b, other=0.0)
    b_v_scale = tl.load(p_v_scale + o_b, mask=m_b, other=0.0)
    b_m = tl.load(p_values + tl.load(p_m + o, mask=m, other=0).to(tl.int32)) * b_m_scale[:, None]
    b_v = tl.load(p_values + 256 + tl.load(p_v + o, mask=m, other=0).to(tl.int32)) * b_v_scale[:, None]
    b_m = beta1 * b_m + rest1 * b_g
    b_v += rest2 * (b_g * b_g - b_v)

    b_m_scale, b_v_scale = tl.max(tl.abs(b_m), 1), tl.max(b_v, 1)
    tl.store(p_m_scale + o_b, b_m_scale, mask=m_b)
    tl.store(p_v_scale + o_b, b_v_scale, mask=m_b)
    b_cell = _cell(tl.abs(b_m) * (1.0 / tl.maximum(b_m_scale, _TINY))[:, None], 1, FAST)
    # There is one more value above zero than below.
    b_code = tl.where(b_m < 0.0, 127 - tl.minimum(b_cell, 127), 127 + b_cell)
    tl.store(p_m + o, b_code.to(tl.uint8), mask=m)
    b_code = _cell(b_v * (1.0 / tl.maximum(b_v_scale, _TINY))[:, None], 2, FAST)
    tl.store(p_v + o, b_code.to(tl.uint8), mask=m)

    b_w = _load(p_w, o, m, W, True)
    if MASTER:
        b_r = tl.load(p_r + o, mask=m, other=0)
        b_w = (b_w.to(tl.int32, bitcast=True) + b_r.to(tl.int32)).to(tl.float32, bitcast=True)
    b_w -= size * (b_m / (tl.sqrt(b_v * inverse) + eps)) + decay * b_w
    if MASTER:
        b_bits = tl.where(b_w == b_w, b_w.to(tl.int32, bitcast=True), 0x7FC00000)
        _store(p_w, o, ((b_bits + 0x8000) >> 16).to(tl.int16), m, True)
        _store(p_r, o, b_bits.to(tl.int16), m, True)
    else:
        b_i = (o + first).to(tl.uint32)
        b_noise = _noise(_hash(b_i, word0.to(tl.uint32)), word2.to(tl.uint32), _MIX_C) & 0xFFFF
        _store(p_w, o, _round(b_w, b_noise, W, ROUNDING), m, True)
