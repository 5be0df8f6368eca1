"""The row kernel of the Jensen-Shannon divergence of logits in 16 bits, for rows whose length is even.

As in `divergence_kernel`, a row is split into parts, passes three phases, and programs exchange sums of parts through
words of global memory. Program i takes part i - distance through the second and the third phase, with what it needs in
registers, and part i through the first, which fills the time in which the other programs of the row of part
i - distance store their Σ p a. So both logits are read from memory once, and once more from L2. It waits for programs
with higher numbers as `divergence_kernel` does with KEEP.

With x = z / T · log2 e - max, and y of the teacher alike plus log2(Z / Z') for Z = Σ 2^x and Z' of the teacher, both
are log-probabilities up to one constant, so that p and q are Z times too large; dz = p (c - Σ p c) (β - 1) ln 2 / T.

Two logits are loaded, compared and stored as one word. Names: i_a, i_b parts; _l and _h the logits in the low and in
the high half of a word; the rest as in `divergence_kernel`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ..cross_entropy.row_kernel import _broadcast, _low_bits, _pack
from .divergence_kernel import _LN2, _log2, _row_sum

# What -inf counts as: no difference of two is NaN, and products with a scale are exact enough for an exponential.
_LOWEST: tl.constexpr = tl.constexpr(-1048576.0)
# Two of them in a word, of bf16 and, where they are -65504, of fp16.
_LOWEST_BF16: tl.constexpr = tl.constexpr(0xC980C980 - 2**32)
_LOWEST_FP16: tl.constexpr = tl.constexpr(0xFBFFFBFF - 2**32)
# A word of a part that does not count: maximum 0, sum 1.
_NEUTRAL: tl.constexpr = tl.constexpr(0x3F800000)


@triton.jit
def _exp2(b_x, FAST: tl.constexpr):
    """2 to the power of numbers; FAST in one instruction, 0 for results below 1e-38."""
    if FAST:
        b_y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, is_pure=True, pack=1)
    else:
        b_y = tl.exp2(b_x)
    return b_y


@triton.jit
def _jsd_terms(b_x, b_y, BETA: tl.constexpr, FAST: tl.constexpr):
    """(p; c; q log2(m / q)) of finite logarithms, where c = log2(m / p). With the logarithm of m over the larger of p
    and q nothing cancels where they are close.
    """
    b_d = b_y - b_x
    b_ratio = _exp2(tl.minimum(b_d, -b_d), FAST)
    if BETA == 0.5:
        b_lm = _log2(0.5 * b_ratio + 0.5, FAST)
    else:
        b_share = tl.where(b_d > 0.0, BETA, 1.0 - BETA)
        b_lm = _log2(b_share + (1.0 - b_share) * b_ratio, FAST)
    b_p = _exp2(b_x, FAST)
    b_c = b_lm + tl.maximum(b_d, 0.0)
    return b_p, b_c, _exp2(b_y, FAST) * (b_lm + tl.maximum(-b_d, 0.0))


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _finite(b_w, BF16: tl.constexpr, FAST: tl.constexpr):
    """Words with -inf replaced by the lowest number; without FAST `_halves` does that."""
    if FAST and BF16:
        b_w = _larger_bf16(b_w, tl.full(b_w.shape, _LOWEST_BF16, tl.int32))
    elif FAST:
        b_w = _larger_fp16(b_w, tl.full(b_w.shape, _LOWEST_FP16, tl.int32))
    return b_w


@triton.jit
def _halves(b_w, BF16: tl.constexpr, FAST: tl.constexpr):
    """Both logits of words, in fp32."""
    if BF16:
        b_l = (b_w << 16).to(tl.float32, bitcast=True)
        b_h = (b_w & -65536).to(tl.float32, bitcast=True)
    else:
        b_l = (b_w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_h = (b_w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if not FAST:
        b_l = tl.where(b_l < _LOWEST, _LOWEST, b_l)
        b_h = tl.where(b_h < _LOWEST, _LOWEST, b_h)
    return b_l, b_h


@triton.jit
def _words(b_l, b_h, BF16: tl.constexpr, FAST: tl.constexpr):
    """Words of two numbers, rounded."""
    if FAST and BF16:
        b_w = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b_l, b_h], tl.int32, is_pure=True, pack=1
        )
    elif FAST:
        b_w = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [b_l, b_h], tl.int32, is_pure=True, pack=1
        )
    else:
        dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        b_w = b_l.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        b_w = b_w | (b_h.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return b_w


@triton.jit
def _larger_pair(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _added_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def _largest(b_w, BF16: tl.constexpr, FAST: tl.constexpr):
    """The largest logit of words."""
    if FAST:
        b_w = tl.reduce(b_w, 0, _larger_bf16 if BF16 else _larger_fp16)
        low, high = _halves(b_w, BF16, FAST)
        largest = tl.maximum(low, high)
    else:
        b_l, b_h = _halves(b_w, BF16, FAST)
        largest = tl.max(tl.maximum(b_l, b_h), 0)
    return largest


@triton.jit
def _load_part(
    p_z, p_t, i_n, stride_z, stride_t, o_v, counted, V: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):
    """Words of z and t of a part, the lowest numbers where there are none."""
    m_v = (o_v < V) & _broadcast(counted, BLOCK)
    LOWEST: tl.constexpr = _LOWEST_BF16 if BF16 else _LOWEST_FP16
    b_z = tl.load(p_z + i_n.to(tl.int64) * stride_z + o_v, mask=m_v, other=LOWEST)
    b_t = tl.load(p_t + i_n.to(tl.int64) * stride_t + o_v, mask=m_v, other=LOWEST)
    return b_z, b_t


@triton.jit
def _publish(
    b_z, b_t, p_word, n_parts, is_there, SCALE: tl.constexpr, BF16: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Phase one: store the maximum and Σ 2^(x - maximum) of z and of t of a part in their words."""
    b_z = _finite(b_z, BF16, FAST)
    b_t = _finite(b_t, BF16, FAST)
    z_top = _largest(b_z, BF16, FAST) * SCALE
    t_top = _largest(b_t, BF16, FAST) * SCALE
    b_zl, b_zh = _halves(b_z, BF16, FAST)
    b_tl, b_th = _halves(b_t, BF16, FAST)
    b_e = _exp2(b_zl * SCALE - z_top, FAST) + _exp2(b_zh * SCALE - z_top, FAST)
    b_q = _exp2(b_tl * SCALE - t_top, FAST) + _exp2(b_th * SCALE - t_top, FAST)
    z_sum, t_sum = tl.reduce((b_e, b_q), 0, _added_pair)
    tl.store(p_word, _pack(z_top, _low_bits(z_sum)), mask=is_there)
    tl.store(p_word + n_parts, _pack(t_top, _low_bits(t_sum)), mask=is_there)


@triton.jit
def _statistics(p_words, n_parts, needed, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """(maxima of z and t of a row; Σ 2^(x - maximum) of both); waits for its parts."""
    o_c = tl.arange(0, PADDED)
    m_c = (o_c < PARTS) & _broadcast(needed, PADDED)
    b_z = tl.load(p_words + o_c, mask=m_c, other=_NEUTRAL, volatile=True)
    b_t = tl.load(p_words + n_parts + o_c, mask=m_c, other=_NEUTRAL, volatile=True)
    while tl.min(((b_z != 0) & (b_t != 0)).to(tl.int32), 0) == 0:
        b_z = tl.load(p_words + o_c, mask=m_c, other=_NEUTRAL, volatile=True)
        b_t = tl.load(p_words + n_parts + o_c, mask=m_c, other=_NEUTRAL, volatile=True)
    m_c = o_c < PARTS
    b_ztop = tl.where(m_c, (b_z >> 32).to(tl.int32).to(tl.float32, bitcast=True), -1e38)
    b_ttop = tl.where(m_c, (b_t >> 32).to(tl.int32).to(tl.float32, bitcast=True), -1e38)
    z_max, t_max = tl.reduce((b_ztop, b_ttop), 0, _larger_pair)
    b_zsum = tl.where(m_c, b_z.to(tl.int32).to(tl.float32, bitcast=True), 0.0) * _exp2(b_ztop - z_max, FAST)
    b_tsum = tl.where(m_c, b_t.to(tl.int32).to(tl.float32, bitcast=True), 0.0) * _exp2(b_ttop - t_max, FAST)
    z_sum, t_sum = tl.reduce((b_zsum, b_tsum), 0, _added_pair)
    return z_max, t_max, z_sum, t_sum


@triton.jit(do_not_specialize=["n_parts", "distance"])
def jsd_kernel(
    p_z, p_t, p_dz, p_target, p_scale, p_partial, p_words,
    n_parts, distance, stride_z, stride_t, stride_dz, stride_scale, ignore_index,
    V: tl.constexpr, BETA: tl.constexpr, TEMPERATURE: tl.constexpr, GRADIENT: tl.constexpr,
    BF16: tl.constexpr, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses of parts of rows, p_partial [N, PARTS], and p_dz [N, V], which may be p_z. V, BLOCK, strides: in words."""
    SCALE: tl.constexpr = 1.4426950408889634 / TEMPERATURE
    i_a = tl.program_id(0)
    i_b = i_a - distance
    is_a = i_a < n_parts
    is_b = i_b >= 0
    i_n = i_b // PARTS
    o_v = i_b % PARTS * BLOCK + tl.arange(0, BLOCK)
    o_a = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
    counted = tl.load(p_target + i_n, mask=is_b, other=ignore_index) != ignore_index
    counted_a = tl.load(p_target + i_a // PARTS, mask=is_a, other=ignore_index) != ignore_index
    b_z, b_t = _load_part(p_z, p_t, i_n, stride_z, stride_t, o_v, counted, V, BF16, BLOCK)
    b_za, b_ta = _load_part(p_z, p_t, i_a // PARTS, stride_z, stride_t, o_a, counted_a, V, BF16, BLOCK)

    z_max, t_max, z_sum, t_sum = _statistics(p_words + i_n * PARTS, n_parts, is_b, FAST, PARTS, PADDED)
    log_ratio = _log2(z_sum, FAST) - _log2(t_sum, FAST)
    b_zl, b_zh = _halves(_finite(b_z, BF16, FAST), BF16, FAST)
    b_tl, b_th = _halves(_finite(b_t, BF16, FAST), BF16, FAST)
    b_pl, b_cl, b_ql = _jsd_terms(b_zl * SCALE - z_max, b_tl * SCALE + (log_ratio - t_max), BETA, FAST)
    b_ph, b_ch, b_qh = _jsd_terms(b_zh * SCALE - z_max, b_th * SCALE + (log_ratio - t_max), BETA, FAST)
    of_p, of_q = tl.reduce((b_pl * b_cl + b_ph * b_ch, b_ql + b_qh), 0, _added_pair)
    if GRADIENT:
        tl.store(p_words + 2 * n_parts + i_b, _pack(of_p, 1), mask=is_b)
    loss = -((1.0 - BETA) * of_p + BETA * of_q) * (_LN2 / z_sum)
    tl.store(p_partial + i_b, tl.where(counted, loss, 0.0), mask=is_b)

    _publish(b_za, b_ta, p_words + i_a, n_parts, is_a, SCALE, BF16, FAST)

    if GRADIENT and is_b:
        row_sum = _row_sum(p_words + 2 * n_parts + i_n * PARTS, PARTS, PADDED) / z_sum
        scale = tl.load(p_scale + i_n.to(tl.int64) * stride_scale, mask=counted, other=0.0)
        scale = scale * ((BETA - 1.0) * _LN2 / TEMPERATURE) / z_sum
        b_dz = _words((b_cl - row_sum) * scale * b_pl, (b_ch - row_sum) * scale * b_ph, BF16, FAST)
        tl.store(p_dz + i_n.to(tl.int64) * stride_dz + o_v, b_dz, mask=o_v < V)
