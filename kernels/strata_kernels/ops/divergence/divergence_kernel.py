"""The general kernel of divergences: losses and gradients of rows of logits in one launch.

Each row is split into parts of BLOCK logits. There are three phases, each of which needs reductions over the row from
the phase before: log-sum-exp of both logits; loss and Σ p c; gradient p (c - Σ p c). Programs exchange partial
reductions through 64-bit words of global memory, one per part, as in `cross_entropy.row_kernel`.

With KEEP, one program computes all phases of a part and holds it in registers, so that each logit is read once: 6 bytes
per pair of bf16 logits, two reads and one write. A program then waits for programs with higher ids, up to the end of
its row. A GPU starts programs in the order of their ids, so this cannot deadlock if all programs of one row can be
resident at once. Without KEEP, program i computes the first phase of part i, the second of part i - distance and the
third of part i - 2 · distance, and waits only for lower ids.

Names: i_n row, i_c part of the row, o_ offsets, p_ pointers, b_ blocks; z student, t teacher.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .._approximations import exp2, log2
from ..cross_entropy.row_kernel import (
    _broadcast,
    _low_bits,
    _pack,
    _shape,
    _slope,
    _wait_for_words,
)

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
_LOWEST: tl.constexpr = tl.constexpr(-1e30)

# Values of KIND.
FORWARD_KL, REVERSE_KL, JSD, TVD = range(4)
_FORWARD_KL: tl.constexpr = tl.constexpr(FORWARD_KL)
_REVERSE_KL: tl.constexpr = tl.constexpr(REVERSE_KL)
_JSD: tl.constexpr = tl.constexpr(JSD)


@triton.jit
def _load(
    p_x, i_n, stride, o_v, counted,
    V: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(logits of a part of row i_n; the same with softcap and temperature, very negative beyond V columns)."""
    m_v = (o_v < V) & _broadcast(counted, BLOCK)
    if SOFTCAP == 0.0 and TEMPERATURE == 1.0 and p_x.dtype.element_ty != tl.float16:
        b_x = tl.load(p_x + i_n.to(tl.int64) * stride + o_v, mask=m_v, other=_LOWEST)
        return b_x, b_x.to(tl.float32)
    b_x = tl.load(p_x + i_n.to(tl.int64) * stride + o_v, mask=m_v, other=0.0)
    return b_x, tl.where(m_v, _shape(b_x, SOFTCAP, TEMPERATURE), _LOWEST)


@triton.jit
def _publish(b_z, p_word, NARROW: tl.constexpr):
    """Store the maximum and Σ exp(z - maximum) of a part in its word."""
    z_top = tl.max(b_z, 0)
    z_max = tl.maximum(z_top, _LOWEST)
    # One multiply-add with a rounded constant is accurate enough for 16-bit logits.
    b_below = b_z * _LOG2E - z_max * _LOG2E if NARROW else (b_z - z_max) * _LOG2E
    tl.store(p_word, _pack(z_top, _low_bits(tl.sum(tl.exp2(b_below), 0))))


@triton.jit
def _log_softmax(b_z, p_words, i_n, PARTS: tl.constexpr, PADDED: tl.constexpr, NARROW: tl.constexpr):
    """log2-probabilities of a part, from the words of its row.

    A divergence is a small difference of these, to which the rounding error of log2 of the sum would contribute in
    every term. So, unless logits are 16-bit, exponent and fraction of the logarithm are subtracted separately.
    """
    o_c = tl.arange(0, PADDED)
    b_word = _wait_for_words(p_words + i_n * PARTS, PARTS, PADDED)
    b_top = tl.where(o_c < PARTS, (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    b_exp = tl.where(o_c < PARTS, b_word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    b_max = tl.maximum(b_top, _LOWEST)
    z_max = tl.max(b_max, 0)
    bits = tl.sum(b_exp * tl.exp2((b_max - z_max) * _LOG2E), 0).to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    fraction = tl.log2(((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True))
    if NARROW:
        b_log = b_z * _LOG2E - (z_max * _LOG2E + exponent + fraction)
    else:
        b_log = (b_z - z_max) * _LOG2E - exponent
        b_log -= fraction
    return b_log


@triton.jit
def _terms(b_lp, b_lq, KIND: tl.constexpr, BETA: tl.constexpr, FAST: tl.constexpr):
    """(p, c p, other terms of the loss) from log2-probabilities of student and teacher.

    c is dloss/dp up to an additive constant, which cancels in p (c - Σ p c), and the factor in `_scaled`.
    """
    if KIND == _JSD:
        # In terms of max(p, q) and the ratio <= 1: no cancellation for p ≈ q, and no overflow. The bound avoids
        # 0 · inf.
        b_d = b_lq - b_lp
        b_far = tl.minimum(tl.abs(b_d), 30000.0)
        b_ratio = exp2(-b_far, FAST)
        b_large = exp2(tl.maximum(b_lp, b_lq), FAST)
        b_small = b_large * b_ratio
        if BETA == 0.5:
            b_lm = log2(0.5 * b_ratio + 0.5, FAST)
        else:
            b_share = tl.where(b_d > 0.0, BETA, 1.0 - BETA)
            b_lm = log2(b_share + (1.0 - b_share) * b_ratio, FAST)
        # larger · log(m / larger) and smaller · log(m / smaller)
        b_x = b_large * b_lm
        b_y = b_small * (b_lm + b_far)
        b_p = tl.where(b_d > 0.0, b_small, b_large)
        b_cp = tl.where(b_d > 0.0, b_y, b_x)
        b_rest = b_x + b_y
    else:
        b_p = exp2(b_lp, FAST)
        b_q = exp2(b_lq, FAST)
        # log2(q / p), 0 if both are -inf.
        b_d = tl.where(b_lp == b_lq, 0.0, b_lq - b_lp)
        b_rest = tl.zeros_like(b_p)
        if KIND == _FORWARD_KL:
            b_cp = -b_q
            b_rest = tl.where(b_q > 0.0, b_q * b_d, 0.0)
        elif KIND == _REVERSE_KL:
            b_cp = tl.where(b_p > 0.0, -b_p * b_d, 0.0)
        else:
            b_cp = tl.where(b_p > b_q, 0.5 * b_p, tl.where(b_p < b_q, -0.5 * b_p, 0.0))
            b_rest = 0.5 * tl.abs(b_p - b_q)
    return b_p, b_cp, b_rest


@triton.jit
def _loss(of_p, rest, KIND: tl.constexpr, BETA: tl.constexpr):
    """The loss of a part, from its sums Σ c p and Σ of other `_terms`."""
    if KIND == _FORWARD_KL:
        loss = _LN2 * rest
    elif KIND == _REVERSE_KL:
        loss = _LN2 * of_p
    elif KIND == _JSD:
        loss = (-BETA * _LN2) * rest
        if BETA != 0.5:
            loss += ((2.0 * BETA - 1.0) * _LN2) * of_p
    else:
        loss = rest
    return loss


@triton.jit
def _scaled(scale, KIND: tl.constexpr, BETA: tl.constexpr):
    """scale times the constant factor of c in `_terms`."""
    if KIND == _REVERSE_KL:
        scale = scale * _LN2
    elif KIND == _JSD:
        scale = scale * ((BETA - 1.0) * _LN2)
    return scale


@triton.jit
def _row_sum(p_words, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Σ p c of a row, after waiting for all of its parts."""
    b_word = _wait_for_words(p_words, PARTS, PADDED)
    b_sum = (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum(tl.where(tl.arange(0, PADDED) < PARTS, b_sum, 0.0), 0)


@triton.jit
def _add_labels(
    b_dz, b_x, o_v, i_n, p_target, p_label_scale, p_largest, p_log_sum, stride_label_scale, SOFTCAP: tl.constexpr
):
    """b_dz plus, unless p_label_scale is None, the gradient of the row's cross entropy at temperature 1."""
    if p_label_scale is not None:
        scale = tl.load(p_label_scale + i_n.to(tl.int64) * stride_label_scale)
        b_below = _shape(b_x, SOFTCAP, 1.0) - tl.load(p_largest + i_n) - tl.load(p_log_sum + i_n)
        b_of_row = tl.exp2(b_below * _LOG2E) - tl.where(o_v == tl.load(p_target + i_n), 1.0, 0.0)
        b_dz += b_of_row * scale * _slope(b_x, SOFTCAP, 1.0)
    return b_dz


@triton.jit(do_not_specialize=["n_parts", "distance"])
def divergence_kernel(
    p_z, p_t, p_dz, p_target, p_scale, p_label_scale, p_largest, p_log_sum, p_partial, p_words,
    n_parts, distance, stride_z, stride_t, stride_dz, stride_scale, stride_label_scale, ignore_index,
    V: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, NORMALIZED: tl.constexpr,
    GRADIENT: tl.constexpr, KEEP: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses of parts of rows, p_partial [N, PARTS], and the gradient p_dz [N, V], which may be p_z.

    p_label_scale [N]: scales of cross entropies of the targets, whose gradients are added to dz; p_largest and
    p_log_sum [N] are then statistics of the rows. NORMALIZED: z and t are log-probabilities, and dz is the gradient
    with respect to them; then no program waits.
    """
    i_a = tl.program_id(0)
    o_a = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
    i_n = i_a // PARTS
    counted = tl.load(p_target + i_n, mask=i_a < n_parts, other=ignore_index) != ignore_index
    if KEEP:
        if counted:
            b_x, b_z = _load(p_z, i_n, stride_z, o_a, counted, V, SOFTCAP, TEMPERATURE, BLOCK)
            _, b_t = _load(p_t, i_n, stride_t, o_a, counted, V, TEACHER_SOFTCAP, TEMPERATURE, BLOCK)
            if NORMALIZED:
                b_z = b_z * _LOG2E
                b_t = b_t * _LOG2E
            else:
                _publish(b_z, p_words + i_a, NARROW)
                _publish(b_t, p_words + n_parts + i_a, NARROW)
                b_z = _log_softmax(b_z, p_words, i_n, PARTS, PADDED, NARROW)
                b_t = _log_softmax(b_t, p_words + n_parts, i_n, PARTS, PADDED, NARROW)
            b_p, b_cp, b_rest = _terms(b_z, b_t, KIND, BETA, FAST)
            tl.store(p_partial + i_a, _loss(tl.sum(b_cp, 0), tl.sum(b_rest, 0), KIND, BETA))
            if GRADIENT:
                scale = _scaled(tl.load(p_scale + i_n.to(tl.int64) * stride_scale), KIND, BETA)
                # The gradient with respect to log-probabilities, p dloss/dp, includes the constant that c omits.
                row_sum = -1.4426950408889634 if KIND == _REVERSE_KL else 0.0
                if not NORMALIZED:
                    row_sum = -1.0
                    if KIND != _FORWARD_KL:
                        tl.store(p_words + 2 * n_parts + i_a, _pack(tl.sum(b_cp, 0), 1))
                        row_sum = _row_sum(p_words + 2 * n_parts + i_n * PARTS, PARTS, PADDED)
                b_dz = (b_cp - b_p * row_sum) * scale * _slope(b_x, SOFTCAP, TEMPERATURE)
                b_dz = _add_labels(
                    b_dz, b_x, o_a, i_n, p_target, p_label_scale, p_largest, p_log_sum, stride_label_scale, SOFTCAP
                )
                p_to = p_dz + i_n.to(tl.int64) * stride_dz + o_a
                tl.store(p_to, b_dz.to(p_dz.dtype.element_ty), mask=o_a < V)
        else:
            tl.store(p_partial + i_a, 0.0, mask=i_a < n_parts)
            if GRADIENT:
                p_to = p_dz + i_n.to(tl.int64) * stride_dz + o_a
                tl.store(p_to, tl.zeros([BLOCK], p_dz.dtype.element_ty), mask=o_a < V)
    else:
        i_b = i_a - distance
        _, b_z = _load(p_z, i_n, stride_z, o_a, counted, V, SOFTCAP, TEMPERATURE, BLOCK)
        _, b_t = _load(p_t, i_n, stride_t, o_a, counted, V, TEACHER_SOFTCAP, TEMPERATURE, BLOCK)
        if (i_b >= 0) & (i_b < n_parts):
            _sum_part(
                p_z, p_t, p_target, p_partial, p_words, i_b // PARTS, i_b % PARTS, n_parts, stride_z, stride_t,
                ignore_index, V, KIND, BETA, SOFTCAP, TEACHER_SOFTCAP, TEMPERATURE, NARROW, FAST, PARTS, PADDED, BLOCK,
            )  # fmt: skip
        if GRADIENT and i_b - distance >= 0:
            _finish_part(
                p_z, p_t, p_dz, p_target, p_scale, p_label_scale, p_largest, p_log_sum, p_words,
                (i_b - distance) // PARTS, (i_b - distance) % PARTS,
                n_parts, stride_z, stride_t, stride_dz, stride_scale, stride_label_scale,
                ignore_index, V, KIND, BETA, SOFTCAP, TEACHER_SOFTCAP, TEMPERATURE, NARROW, FAST, PARTS, PADDED, BLOCK,
            )  # fmt: skip
        if counted:
            _publish(b_z, p_words + i_a, NARROW)
            _publish(b_t, p_words + n_parts + i_a, NARROW)


@triton.jit
def _log_probs(
    p_z, p_t, p_words, i_n, n_parts, stride_z, stride_t, o_v,
    V: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    NARROW: tl.constexpr, FAST: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(student's logits, log2-probabilities of student and teacher) of a part, after phase one of its row."""
    b_x, b_z = _load(p_z, i_n, stride_z, o_v, i_n >= 0, V, SOFTCAP, TEMPERATURE, BLOCK)
    _, b_t = _load(p_t, i_n, stride_t, o_v, i_n >= 0, V, TEACHER_SOFTCAP, TEMPERATURE, BLOCK)
    b_lp = _log_softmax(b_z, p_words, i_n, PARTS, PADDED, NARROW)
    return b_x, b_lp, _log_softmax(b_t, p_words + n_parts, i_n, PARTS, PADDED, NARROW)


@triton.jit
def _sum_part(
    p_z, p_t, p_target, p_partial, p_words, i_n, i_c, n_parts, stride_z, stride_t, ignore_index,
    V: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Phase two of part i_c of row i_n."""
    i_a = i_n * PARTS + i_c
    if tl.load(p_target + i_n) != ignore_index:
        o_v = i_c * BLOCK + tl.arange(0, BLOCK)
        _, b_lp, b_lq = _log_probs(
            p_z, p_t, p_words, i_n, n_parts, stride_z, stride_t, o_v,
            V, SOFTCAP, TEACHER_SOFTCAP, TEMPERATURE, NARROW, FAST, PARTS, PADDED, BLOCK,
        )  # fmt: skip
        _, b_cp, b_rest = _terms(b_lp, b_lq, KIND, BETA, FAST)
        tl.store(p_partial + i_a, _loss(tl.sum(b_cp, 0), tl.sum(b_rest, 0), KIND, BETA))
        tl.store(p_words + 2 * n_parts + i_a, _pack(tl.sum(b_cp, 0), 1))
    else:
        tl.store(p_partial + i_a, 0.0)


@triton.jit
def _finish_part(
    p_z, p_t, p_dz, p_target, p_scale, p_label_scale, p_largest, p_log_sum, p_words, i_n, i_c, n_parts,
    stride_z, stride_t, stride_dz, stride_scale, stride_label_scale, ignore_index,
    V: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr, NARROW: tl.constexpr, FAST: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Phase three of part i_c of row i_n."""
    o_v = i_c * BLOCK + tl.arange(0, BLOCK)
    p_to = p_dz + i_n.to(tl.int64) * stride_dz + o_v
    if tl.load(p_target + i_n) != ignore_index:
        b_x, b_lp, b_lq = _log_probs(
            p_z, p_t, p_words, i_n, n_parts, stride_z, stride_t, o_v,
            V, SOFTCAP, TEACHER_SOFTCAP, TEMPERATURE, NARROW, FAST, PARTS, PADDED, BLOCK,
        )  # fmt: skip
        b_p, b_cp, _ = _terms(b_lp, b_lq, KIND, BETA, FAST)
        # In place is safe: phase two loads the logits before it stores the words awaited here.
        row_sum = _row_sum(p_words + 2 * n_parts + i_n * PARTS, PARTS, PADDED)
        scale = _scaled(tl.load(p_scale + i_n.to(tl.int64) * stride_scale), KIND, BETA)
        b_dz = (b_cp - b_p * row_sum) * scale * _slope(b_x, SOFTCAP, TEMPERATURE)
        b_dz = _add_labels(
            b_dz, b_x, o_v, i_n, p_target, p_label_scale, p_largest, p_log_sum, stride_label_scale, SOFTCAP
        )
        tl.store(p_to, b_dz.to(p_dz.dtype.element_ty), mask=o_v < V)
    else:
        tl.store(p_to, tl.zeros([BLOCK], p_dz.dtype.element_ty), mask=o_v < V)
