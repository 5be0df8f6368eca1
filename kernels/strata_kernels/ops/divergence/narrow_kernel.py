"""The kernel of divergences of 16-bit logits, which reads each logit once.

As in `divergence_kernel`, a row is split into parts, there are three phases, and programs exchange partial sums
through words of global memory. Here a persistent group of programs, one per part, loops over rows, software-pipelined:
a program loads its part of the next row, then runs phase two of the current row, phase one of the next and phase three
of the current. So waiting for the sums of one row overlaps with work on another, and a part stays in registers through
all phases: 6 bytes per pair of logits, two reads and one write.

Groups do not wait for each other. Within a group, programs also wait for higher ids. A GPU starts programs in the
order of their ids, so this cannot deadlock if all programs of one group can be resident at once.

With x = z / T · log2 e - max, y likewise for the teacher plus log2(Z / Z'), Z = Σ 2^x and Z' of the teacher, x and y
are log2-probabilities up to the same constant, so that p and q are too large by the factor Z.

Two logits are loaded, compared and stored as one 32-bit word. Names: i_g group; i_b current row, i_a next row; _l and
_h the logits in the low and high half of a word; the rest as in `divergence_kernel`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .._approximations import exp2, log2
from ..cross_entropy.row_kernel import _low_bits, _pack
from .divergence_kernel import _FORWARD_KL, _JSD, _loss, _scaled, _terms

# A word of two -inf.
_NOTHING_BF16: tl.constexpr = tl.constexpr(0xFF80FF80 - 2**32)
_NOTHING_FP16: tl.constexpr = tl.constexpr(0xFC00FC00 - 2**32)
# Lower bound of log2-probabilities: 1e-30.
_LEAST_LOG: tl.constexpr = tl.constexpr(-100.0)
# Lower bound of the maximum of a part, so that differences from it are not NaN.
_LEAST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _larger_word_bf16(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger_word_fp16(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger_bf16(a, b, c, d):
    return _larger_word_bf16(a, c), _larger_word_bf16(b, d)


@triton.jit
def _larger_fp16(a, b, c, d):
    return _larger_word_fp16(a, c), _larger_word_fp16(b, d)


@triton.jit
def _larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _added(a, b, c, d):
    return a + c, b + d


@triton.jit
def _halves(b_w, BF16: tl.constexpr):
    """(low logits, high logits) of words, fp32."""
    if BF16:
        b_l = (b_w << 16).to(tl.float32, bitcast=True)
        b_h = (b_w & -65536).to(tl.float32, bitcast=True)
    else:
        b_l = (b_w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_h = (b_w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_l, b_h


@triton.jit
def _logits(b_w, BF16: tl.constexpr):
    """The logits of words, fp32, in memory order."""
    b_l, b_h = _halves(b_w, BF16)
    return tl.interleave(b_l, b_h)


@triton.jit
def _at_least(b_w, least, BF16: tl.constexpr, FAST: tl.constexpr):
    """Words with logits clamped to about `least`; without FAST, `_pair_terms` clamps."""
    if FAST:
        if BF16:
            least_bits = least.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        else:
            least_bits = tl.maximum(least, -65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        b_least = tl.full(b_w.shape, least_bits | (least_bits << 16), tl.int32)
        b_w = _larger_word_bf16(b_w, b_least) if BF16 else _larger_word_fp16(b_w, b_least)
    return b_w


@triton.jit
def _words(b_l, b_h, BF16: tl.constexpr, FAST: tl.constexpr):
    """Words of b_l and b_h, rounded to 16 bits."""
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
def _load(p_x, i_n, stride, o_v, V: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):
    """Words of a part of row i_n, -inf beyond V."""
    p_from = p_x + i_n.to(tl.int64) * stride + o_v
    if V % BLOCK == 0:
        b_w = tl.load(p_from)
    else:
        b_w = tl.load(p_from, mask=o_v < V, other=_NOTHING_BF16 if BF16 else _NOTHING_FP16)
    return b_w


@triton.jit
def _load_both(
    p_z, p_t, i_n, stride_z, stride_t, o_v, counted, V: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr
):
    """Words of a part of z and of t; 0 for an ignored row."""
    b_z = tl.zeros([BLOCK], tl.int32)
    b_t = tl.zeros([BLOCK], tl.int32)
    if counted:
        b_z = _load(p_z, i_n, stride_z, o_v, V, BF16, BLOCK)
        b_t = _load(p_t, i_n, stride_t, o_v, V, BF16, BLOCK)
    return b_z, b_t


@triton.jit
def _publish(b_z, b_t, p_word, n_parts, SCALE: tl.constexpr, BF16: tl.constexpr, FAST: tl.constexpr):
    """Phase one: store the maximum and Σ 2^(x - maximum) of z and of t of a part in their words."""
    if FAST:
        z_top, t_top = tl.reduce((b_z, b_t), 0, _larger_bf16 if BF16 else _larger_fp16)
        z_l, z_h = _halves(z_top, BF16)
        t_l, t_h = _halves(t_top, BF16)
        z_max, t_max = tl.maximum(z_l, z_h), tl.maximum(t_l, t_h)
    else:
        z_max, t_max = tl.reduce((_logits(b_z, BF16), _logits(b_t, BF16)), 0, _larger)
    z_max = tl.maximum(z_max, _LEAST) * SCALE
    t_max = tl.maximum(t_max, _LEAST) * SCALE
    b_p = exp2(_logits(b_z, BF16) * SCALE - z_max, FAST)
    b_q = exp2(_logits(b_t, BF16) * SCALE - t_max, FAST)
    z_sum, t_sum = tl.reduce((b_p, b_q), 0, _added)
    tl.store(p_word, _pack(z_max, _low_bits(z_sum)))
    tl.store(p_word + n_parts, _pack(t_max, _low_bits(t_sum)))


@triton.jit
def _wait(p_word, FAST: tl.constexpr):
    """Wait until the words at p_word are nonzero, and return them; FAST: without exchange between threads."""
    if FAST:
        b_word = tl.inline_asm_elementwise(
            "{ .reg .pred q; WAIT: ld.volatile.global.b64 $0, [$1]; setp.eq.s64 q, $0, 0;"
            " vote.sync.any.pred q, q, 0xffffffff; @q bra WAIT; }",
            "=&l,l", [p_word.to(tl.int64)], tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        b_word = tl.load(p_word, volatile=True)
        while tl.min((b_word != 0).to(tl.int32), 0) == 0:
            b_word = tl.load(p_word, volatile=True)
    return b_word


@triton.jit
def _pair_terms(b_x, b_y, KIND: tl.constexpr, BETA: tl.constexpr, FAST: tl.constexpr):
    """(p, c p, other terms of the loss) as `_terms`, from log2-probabilities up to a common constant.

    For jsd c instead of c p, with three special-function instructions. Bounds avoid 0 · inf; there is no overflow,
    because logarithms are at most log2 of the number of logits.
    """
    if KIND == _JSD:
        if not FAST:
            b_x = tl.maximum(b_x, _LEAST_LOG)
            b_y = tl.maximum(b_y, _LEAST_LOG)
        b_d = b_y - b_x
        b_ratio = exp2(b_d, FAST)
        b_c = log2(BETA * b_ratio + (1.0 - BETA), FAST)
        b_p = exp2(b_x, FAST)
        b_rest = (b_p * b_ratio) * (b_c - b_d)
    else:
        b_p, b_c, b_rest = _terms(b_x, b_y, KIND, BETA, FAST)
    return b_p, b_c, b_rest


@triton.jit
def _times_p(b_p, b_c, KIND: tl.constexpr):
    return b_p * b_c if KIND == _JSD else b_c


@triton.jit
def _scaled_difference(b_p, b_c, scale, row_sum, KIND: tl.constexpr):
    """scale · (c p - row_sum · p) of `_pair_terms`."""
    of_row = row_sum * scale
    return b_p * (b_c * scale - of_row) if KIND == _JSD else b_c * scale - b_p * of_row


@triton.jit
def _statistics(p_words, n_parts, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """(maxima of z and t of a row, Σ 2^(x - maximum) of both), after waiting for all parts."""
    o_c = tl.arange(0, PADDED)
    p_word = p_words + tl.minimum(o_c, PARTS - 1)
    b_z, b_t = _wait(p_word, FAST), _wait(p_word + n_parts, FAST)
    b_zmax = (b_z >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b_tmax = (b_t >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    z_max, t_max = tl.reduce((b_zmax, b_tmax), 0, _larger)
    b_zsum = b_z.to(tl.int32).to(tl.float32, bitcast=True) * exp2(b_zmax - z_max, FAST)
    b_tsum = b_t.to(tl.int32).to(tl.float32, bitcast=True) * exp2(b_tmax - t_max, FAST)
    z_sum, t_sum = tl.reduce((tl.where(o_c < PARTS, b_zsum, 0.0), tl.where(o_c < PARTS, b_tsum, 0.0)), 0, _added)
    return z_max, t_max, z_sum, t_sum


@triton.jit
def _row_sum(p_words, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Σ p c of a row, after waiting for all parts."""
    o_c = tl.arange(0, PADDED)
    b_sum = (_wait(p_words + tl.minimum(o_c, PARTS - 1), FAST) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum(tl.where(o_c < PARTS, b_sum, 0.0), 0)


@triton.jit
def _store_row(p_dz, i_n, stride, o_v, b_w, V: tl.constexpr, BLOCK: tl.constexpr):
    p_to = p_dz + i_n.to(tl.int64) * stride + o_v
    if V % BLOCK == 0:
        tl.store(p_to, b_w)
    else:
        tl.store(p_to, b_w, mask=o_v < V)


@triton.jit(do_not_specialize=["n_rows", "n_groups", "n_parts"])
def narrow_divergence_kernel(
    p_z, p_t, p_dz, p_target, p_scale, p_partial, p_words,
    n_rows, n_groups, n_parts, stride_z, stride_t, stride_dz, stride_scale, ignore_index,
    V: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr, TEMPERATURE: tl.constexpr, GRADIENT: tl.constexpr,
    BF16: tl.constexpr, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses of parts of rows, p_partial [N, PARTS], and p_dz, which may be p_z. V, BLOCK and strides count words."""
    SCALE: tl.constexpr = 1.4426950408889634 / TEMPERATURE
    i_c = tl.program_id(0) % PARTS
    i_g = tl.program_id(0) // PARTS
    o_v = i_c * BLOCK + tl.arange(0, BLOCK)
    counted_b = tl.load(p_target + i_g) != ignore_index
    counted_a = tl.load(p_target + i_g + n_groups, mask=i_g + n_groups < n_rows, other=ignore_index) != ignore_index
    b_z, b_t = _load_both(p_z, p_t, i_g, stride_z, stride_t, o_v, counted_b, V, BF16, BLOCK)
    if counted_b:
        _publish(b_z, b_t, p_words + i_g * PARTS + i_c, n_parts, SCALE, BF16, FAST)
    i_b = i_g
    for _ in tl.range(0, tl.cdiv(n_rows - i_g, n_groups)):
        i_a = i_b + n_groups
        b_za, b_ta = _load_both(p_z, p_t, i_a, stride_z, stride_t, o_v, counted_a, V, BF16, BLOCK)
        i_next = i_a + n_groups
        counted_next = tl.load(p_target + i_next, mask=i_next < n_rows, other=ignore_index) != ignore_index
        i_word = i_b * PARTS
        p_next = p_words + i_a * PARTS + i_c
        if counted_b:
            z_max, t_max, z_sum, t_sum = _statistics(p_words + i_word, n_parts, FAST, PARTS, PADDED)
            log_ratio = tl.log2(z_sum) - tl.log2(t_sum)
            if KIND == _JSD:
                b_z = _at_least(b_z, (z_max + _LEAST_LOG) / SCALE, BF16, FAST)
                b_t = _at_least(b_t, (t_max + _LEAST_LOG) / SCALE, BF16, FAST)
            b_x = _logits(b_z, BF16) * SCALE - z_max
            if KIND == _JSD:
                # Rounding of the sum of log_ratio and t_max is negligible for a divergence from a mixture.
                b_y = _logits(b_t, BF16) * SCALE + (log_ratio - t_max)
            else:
                b_y = _logits(b_t, BF16) * SCALE - t_max + log_ratio
            b_p, b_c, b_rest = _pair_terms(b_x, b_y, KIND, BETA, FAST)
            of_p, rest = tl.reduce((_times_p(b_p, b_c, KIND), b_rest), 0, _added)
            if GRADIENT and KIND != _FORWARD_KL:
                tl.store(p_words + 2 * n_parts + i_word + i_c, _pack(of_p, 1))
            if KIND == _JSD:
                rest += of_p
            tl.store(p_partial + i_word + i_c, _loss(of_p, rest, KIND, BETA) / z_sum)
            if counted_a:
                _publish(b_za, b_ta, p_next, n_parts, SCALE, BF16, FAST)
            if GRADIENT:
                row_sum = -1.0
                if KIND != _FORWARD_KL:
                    row_sum = _row_sum(p_words + 2 * n_parts + i_word, FAST, PARTS, PADDED) / z_sum
                scale = _scaled(tl.load(p_scale + i_b.to(tl.int64) * stride_scale), KIND, BETA) / (TEMPERATURE * z_sum)
                b_dz = _scaled_difference(b_p, b_c, scale, row_sum, KIND)
                b_l, b_h = tl.split(tl.reshape(b_dz, [BLOCK, 2]))
                _store_row(p_dz, i_b, stride_dz, o_v, _words(b_l, b_h, BF16, FAST), V, BLOCK)
        else:
            tl.store(p_partial + i_word + i_c, 0.0)
            if counted_a:
                _publish(b_za, b_ta, p_next, n_parts, SCALE, BF16, FAST)
            if GRADIENT:
                _store_row(p_dz, i_b, stride_dz, o_v, tl.zeros([BLOCK], tl.int32), V, BLOCK)
        i_b = i_a
        b_z = b_za
        b_t = b_ta
        counted_b = counted_a
        counted_a = counted_next
