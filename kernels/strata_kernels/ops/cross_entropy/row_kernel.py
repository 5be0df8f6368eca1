"""The row kernel of the losses: statistics, losses and gradients of rows of logits in one launch.

Each row is split into parts of BLOCK logits, one program each. The gradient of a part needs the maximum and the sum of
exponentials of its whole row, so every logit is read twice. To read it from memory only once, program i computes the
statistics of part i and the gradient of part i - distance: by then every program of that row has stored its
statistics, and the logits are still in L2. In bf16, 4 bytes of memory traffic remain per logit, one read and one write.
Programs exchange statistics through one 64-bit word of global memory per part.

A program waits only for programs with lower ids. A GPU starts programs in the order of their ids (scans with decoupled
look-back rely on that, too), so the kernel cannot deadlock, however few programs are resident.

Names: i_n row, i_c part of the row, o_ offsets, p_ pointers, b_ blocks; V columns of z, TOTAL classes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Lower bound of the subtracted maximum: finite even if all logits are -inf.
LOWEST = -1e30
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


@triton.jit
def _tanh(b_u):
    """tanh with a relative error of 2e-7: an odd polynomial near zero, where the exponential form would cancel."""
    b_w = b_u * b_u
    b_small = -0.00599296 * b_w + 0.02092415
    b_small = b_small * b_w - 0.05383514
    b_small = b_small * b_w + 0.13332663
    b_small = b_small * b_w - 0.33333328
    b_small = b_u + b_u * b_w * b_small
    b_e = tl.exp(-2.0 * tl.abs(b_u))
    b_large = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(b_w < 0.4, b_small, tl.where(b_u < 0.0, -b_large, b_large))


@triton.jit
def _shape(b_z, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Logits with softcap and temperature, in fp32."""
    b_z = b_z.to(tl.float32)
    if SOFTCAP > 0.0:
        b_z = SOFTCAP * _tanh(b_z / SOFTCAP)
    if TEMPERATURE != 1.0:
        b_z = b_z / TEMPERATURE
    return b_z


@triton.jit
def _slope(b_x, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """The derivative of `_shape`, without the cancellation of 1 - tanh²."""
    b_slope = 1.0
    if SOFTCAP > 0.0:
        b_e = tl.exp(-2.0 / SOFTCAP * tl.abs(b_x.to(tl.float32)))
        b_r = 1.0 / (1.0 + b_e)
        b_slope = 4.0 * b_e * b_r * b_r
    if TEMPERATURE != 1.0:
        b_slope = b_slope / TEMPERATURE
    return b_slope


@triton.jit
def _inside(o_v, V: tl.constexpr):
    return (o_v >= 0) & (o_v < V)


@triton.jit
def _class_weights(p_weight, o_v, V: tl.constexpr):
    """The class weights at columns o_v, 0 for o_v >= V; the scalar 1 without class weights."""
    b_w = 1.0
    if p_weight is not None:
        b_w = tl.load(p_weight + o_v, mask=_inside(o_v, V), other=0.0)
    return b_w


@triton.jit
def _gradient(
    b_x, z_max, log_sum, b_w, b_one_hot, scale, factor, entropy_scale, mean,
    TOTAL: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """scale · dloss/dx for logits x, blocks or scalars; factor = scale · (lse_weight + 2 · z_loss · lse)."""
    # Two subtractions: z_max + log_sum would lose the low bits of log_sum.
    b_below = _shape(b_x, SOFTCAP, TEMPERATURE) - z_max
    if ENTROPY:
        # For a logit of -inf, p is 0 and must not be multiplied by inf.
        factor += entropy_scale * (mean - tl.maximum(b_below, -10000.0))
    b_dz = tl.exp2((b_below - log_sum) * _LOG2E) * factor - b_one_hot
    if SMOOTHING > 0.0:
        b_dz -= b_w * (SMOOTHING / TOTAL * scale)
    return b_dz * _slope(b_x, SOFTCAP, TEMPERATURE)


@triton.jit
def _pack(high, low):
    """An fp32 and 32 more bits in one 64-bit word, which is stored and loaded atomically."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def _low_bits(x):
    """An fp32 as the lower half of a `_pack`ed word."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _broadcast(condition, BLOCK: tl.constexpr):
    """A scalar condition as a block; Triton's interpreter cannot combine scalar and block masks."""
    return tl.full([BLOCK], condition.to(tl.int32), tl.int32) != 0


@triton.jit
def _wait_for_words(p_words, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Wait until the words of all parts of a row are nonzero, and return them."""
    o_c = tl.arange(0, PADDED)
    b_word = tl.load(p_words + o_c, mask=o_c < PARTS, other=1, volatile=True)
    while tl.min((b_word != 0).to(tl.int32), 0) == 0:
        b_word = tl.load(p_words + o_c, mask=o_c < PARTS, other=1, volatile=True)
    return b_word


@triton.jit
def _row_bounds(i_n, n_inner, stride_outer, stride_inner, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """(offset of row i_n rounded down to a multiple of GROUP; its first column relative to that; its end)."""
    start = (i_n // n_inner).to(tl.int64) * stride_outer + (i_n % n_inner).to(tl.int64) * stride_inner
    shift = 0
    end = WIDTH
    if GROUP > 1:
        shift = (start % GROUP).to(tl.int32)
        start = tl.multiple_of(start - shift, GROUP)
        end = tl.multiple_of((shift + WIDTH + GROUP - 1) // GROUP * GROUP, GROUP)
    return start, shift, end


@triton.jit
def _publish_statistics(
    b_x, o_v, p_word, p_weight, n_parts,
    V: tl.constexpr, OVERREAD: tl.constexpr, FILL: tl.constexpr,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, PREDICT: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Store the statistics of one part of a row as nonzero words.

    First word: the maximum and Σ exp(z - maximum). Second, with label smoothing: Σ w (z - maximum) and Σ w. Third, with
    predictions: V + argmax, or the column of a NaN, which `argmax` treats as the maximum, without V.
    Fourth, for the entropy: Σ exp(z - maximum) (z - maximum).
    """
    if OVERREAD:
        b_x = tl.where(_inside(o_v, V), b_x, 0.0)
    b_z = _shape(b_x, SOFTCAP, TEMPERATURE)
    b_inside = b_z if FILL != 0.0 else tl.where(_inside(o_v, V), b_z, -float("inf"))
    z_top = tl.max(b_inside, 0)
    z_max = tl.maximum(z_top, _LOWEST)
    z_exp = tl.sum(tl.exp2((b_inside - z_max) * _LOG2E), 0)
    if SMOOTHING > 0.0:
        b_w = tl.where(_inside(o_v, V), _class_weights(p_weight, o_v, V), 0.0)
        z_sum = tl.sum(tl.where(_inside(o_v, V), b_w * (b_z - z_max), 0.0), 0)
        tl.store(p_word + n_parts, _pack(z_sum, _low_bits(tl.sum(b_w, 0)) + 1))
    if PREDICT:
        b_best = tl.where(_inside(o_v, V) & (b_inside == z_top), V + o_v, 2 * V)
        best = tl.min(tl.where(b_inside != b_inside, o_v, b_best), 0)
        tl.store(p_word + 2 * n_parts, best.to(tl.int64) + 1)
    if MEAN:
        b_below = tl.maximum(b_inside - z_max, -10000.0)
        z_mean = tl.sum(tl.exp2(b_below * _LOG2E) * b_below, 0)
        tl.store(p_word + 3 * n_parts, _pack(z_mean, 1))
    tl.store(p_word, _pack(z_top, _low_bits(z_exp)))


@triton.jit(do_not_specialize=["n_parts", "distance", "n_inner"])
def cross_entropy_kernel(
    p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_entropy_scale,
    p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean, p_words,
    n_parts, distance, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz, stride_scale, ignore_index, start,
    V: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Statistics of part i and gradient of part i - distance; one program of each row stores the row's results.

    Without STATISTICS, the kernel reads largest, log_sum and lse_weight instead of computing them. If V < TOTAL, the
    logits are a shard of the vocabulary, and p_loss receives `Statistics.linear`, the part of the loss that is linear
    in the logits. GROUP is 1 if rows are aligned to 16 bytes. Otherwise it is the number of logits in 16 bytes, and the
    kernel loads every aligned group that overlaps the row, which never crosses a page.
    """
    # Whether loads include columns outside the row.
    OVERREAD: tl.constexpr = WIDTH > V or GROUP > 1
    # Value of masked loads. -inf affects neither maximum nor sum, but is only safe if no other term reads it.
    FILL: tl.constexpr = 0.0 if SMOOTHING > 0.0 or SOFTCAP > 0.0 or OVERREAD else -float("inf")
    i_a = tl.program_id(0)
    i_b = i_a - distance
    if STATISTICS:
        # Issue the loads early: their values are used only after the gradient of the other part.
        o_a = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
        counted_a = tl.load(p_target + i_a // PARTS, mask=i_a < n_parts, other=ignore_index) != ignore_index
        start_a, shift_a, end_a = _row_bounds(i_a // PARTS, n_inner, stride_z_outer, stride_z, WIDTH, GROUP)
        b_a = tl.load(p_z + start_a + o_a, mask=(o_a < end_a) & _broadcast(counted_a, BLOCK), other=FILL)
    if i_b >= 0:
        _finish_part(
            p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_entropy_scale,
            p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean, p_words,
            i_b // PARTS, i_b % PARTS, n_parts, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz,
            stride_scale, ignore_index, start,
            V, WIDTH, TOTAL, SMOOTHING, Z_LOSS, SOFTCAP, TEMPERATURE, STATISTICS, GRADIENT, PARTS, PADDED, BLOCK, GROUP,
        )  # fmt: skip
    if STATISTICS and counted_a:
        PREDICT: tl.constexpr = p_prediction is not None
        MEAN: tl.constexpr = p_mean is not None
        _publish_statistics(
            b_a, o_a - shift_a, p_words + i_a, p_weight, n_parts,
            V, OVERREAD, FILL, SMOOTHING, SOFTCAP, TEMPERATURE, PREDICT, MEAN,
        )  # fmt: skip


@triton.jit
def _finish_part(
    p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_entropy_scale,
    p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean, p_words,
    i_n, i_c, n_parts, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz, stride_scale, ignore_index, start,
    V: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the gradient of part i_c of row i_n, and the row's results if this part is responsible for them."""
    target = tl.load(p_target + i_n)
    o_b = i_c * BLOCK + tl.arange(0, BLOCK)
    if GRADIENT:
        start_dz, shift, end = _row_bounds(i_n, n_inner, stride_dz_outer, stride_dz, WIDTH, GROUP)
        p_dz += start_dz
    if target == ignore_index:
        if GRADIENT:
            _store_gradient(p_dz, i_c * BLOCK, tl.zeros([BLOCK], tl.float32), shift, end, V, GROUP, BLOCK)
        if STATISTICS:
            _store_fields(
                p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean,
                i_n, 0.0, 0.0, 0.0, 0.0, -1, 0.0, i_c == 0,
            )  # fmt: skip
    elif GRADIENT or i_c == 0:
        start_z, shift, end = _row_bounds(i_n, n_inner, stride_z_outer, stride_z, WIDTH, GROUP)
        p_z += start_z
        if GRADIENT:
            b_x = tl.load(p_z + o_b, mask=o_b < end, other=0.0, eviction_policy="evict_first")
            scale = tl.load(p_scale + i_n.to(tl.int64) * stride_scale)
        # A kernel cannot raise: a target outside the vocabulary makes the row's loss and gradient NaN.
        poison = tl.where((target >= 0) & (target < TOTAL), 0.0, float("nan"))
        column = target - start
        inside = (column >= 0) & (column < V)
        has_target = inside & ((column + shift) // BLOCK == i_c)
        first = i_c == 0
        writes_results = has_target | (first & (inside == 0)) if GRADIENT else first
        x_target = tl.load(p_z + shift + column, mask=writes_results & inside, other=0.0)
        target_weight = 1.0
        lse_weight = 1.0
        if p_weight is not None:
            target_weight = tl.load(p_weight + column, mask=inside, other=0.0)

        if STATISTICS:
            p_words += i_n * PARTS
            z_max, log_sum, b_top = _combine_parts(p_words, PARTS, PADDED)
            if p_weight is not None:
                lse_weight = (1.0 - SMOOTHING) * target_weight
                if SMOOTHING > 0.0:
                    lse_weight += SMOOTHING / TOTAL * tl.load(p_weight_sum)
            elif V < TOTAL:
                lse_weight = tl.where(inside, 1.0 - SMOOTHING, 0.0) + SMOOTHING * V / TOTAL
            if writes_results:
                linear = (1.0 - SMOOTHING) * target_weight * (_shape(x_target, SOFTCAP, TEMPERATURE) - z_max)
                linear = tl.where(inside, linear, 0.0)
                _store_results(
                    p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean, p_words, i_n, n_parts, start,
                    z_max, log_sum, b_top, linear + poison, lse_weight, V, TOTAL, SMOOTHING, Z_LOSS, PARTS, PADDED,
                )  # fmt: skip
        else:
            z_max = tl.load(p_largest + i_n)
            log_sum = tl.load(p_log_sum + i_n)
            if p_lse_weight is not None:
                lse_weight = tl.load(p_lse_weight + i_n)

        if GRADIENT:
            scale += poison
            ENTROPY: tl.constexpr = p_entropy_scale is not None
            entropy_scale = 0.0
            mean = 0.0
            if ENTROPY:
                entropy_scale = tl.load(p_entropy_scale + i_n.to(tl.int64) * stride_scale)
                mean = tl.load(p_mean + i_n)
            factor = (lse_weight + 2.0 * Z_LOSS * (z_max + log_sum)) * scale
            o_v = o_b - shift
            if WIDTH > V or GROUP > 1:
                b_x = tl.where(_inside(o_v, V), b_x, 0.0)
            b_w = _class_weights(p_weight, o_v, V) if SMOOTHING > 0.0 else 0.0
            b_dz = _gradient(
                b_x, z_max, log_sum, b_w, 0.0, scale, factor, entropy_scale, mean,
                TOTAL, SMOOTHING, SOFTCAP, TEMPERATURE, ENTROPY,
            )  # fmt: skip
            if has_target:
                # In place, another thread overwrites the target's logit: synchronize after it is loaded.
                tl.debug_barrier()
            _store_gradient(p_dz, i_c * BLOCK, b_dz, shift, end, V, GROUP, BLOCK)
            if has_target:
                # The target's gradient has one more term: overwrite the value stored above.
                tl.debug_barrier()
                one_hot = (1.0 - SMOOTHING) * target_weight * scale
                dz = _gradient(
                    x_target, z_max, log_sum, target_weight, one_hot, scale, factor, entropy_scale, mean,
                    TOTAL, SMOOTHING, SOFTCAP, TEMPERATURE, ENTROPY,
                )  # fmt: skip
                tl.store(p_dz + shift + column, dz.to(p_dz.dtype.element_ty))


@triton.jit
def _store_gradient(p_dz, first, b_dz, shift, end, V: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of one part, only this row's columns where a group overlaps a neighboring row."""
    b_dz = b_dz.to(p_dz.dtype.element_ty)
    o_b = first + tl.arange(0, BLOCK)
    if GROUP == 1:
        tl.store(p_dz + o_b, b_dz, mask=o_b < end, eviction_policy="evict_first")
    elif (first >= shift) & (first + BLOCK <= shift + V):
        tl.store(p_dz + o_b, b_dz, eviction_policy="evict_first")
    else:
        tl.store(p_dz + o_b, b_dz, mask=_inside(o_b - shift, V), eviction_policy="evict_first")


@triton.jit
def _combine_parts(p_words, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """(maximum of a row, log Σ exp(z - maximum), maxima of its parts), after waiting for all parts."""
    o_c = tl.arange(0, PADDED)
    b_word = _wait_for_words(p_words, PARTS, PADDED)
    b_top = tl.where(o_c < PARTS, (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    b_max = tl.maximum(b_top, _LOWEST)
    b_exp = tl.where(o_c < PARTS, b_word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    z_max = tl.max(b_max, 0)
    return z_max, tl.log2(tl.sum(b_exp * tl.exp2((b_max - z_max) * _LOG2E), 0)) * _LN2, b_top


@triton.jit
def _store_results(
    p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean, p_words, i_n, n_parts, start,
    z_max, log_sum, b_top, linear, lse_weight,
    V: tl.constexpr, TOTAL: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store the results of row i_n; linear is the target's term of `Statistics.linear`."""
    o_c = tl.arange(0, PADDED)
    if SMOOTHING > 0.0:
        b_word = _wait_for_words(p_words + n_parts, PARTS, PADDED)
        b_sum = (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        b_weight = (b_word.to(tl.int32) - 1).to(tl.float32, bitcast=True)
        b_sum += b_weight * (tl.maximum(b_top, _LOWEST) - z_max)
        linear += SMOOTHING / TOTAL * tl.sum(tl.where(o_c < PARTS, b_sum, 0.0), 0)
    lse = z_max + log_sum
    best = 0
    if p_prediction is not None:
        b_word = _wait_for_words(p_words + 2 * n_parts, PARTS, PADDED)
        b_best = b_word.to(tl.int32) - 1
        is_best = (b_best < V) | (b_top == tl.max(b_top, 0))
        best = tl.min(tl.where(is_best & (o_c < PARTS), b_best, 2 * V), 0)
        # A NaN maximum propagates the NaN to the other shards of the vocabulary.
        z_max = tl.where(best < V, float("nan"), z_max)
        best = best % V
    mean = 0.0
    if p_mean is not None:
        b_word = _wait_for_words(p_words + 3 * n_parts, PARTS, PADDED)
        b_mean = (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        b_below = tl.maximum(b_top, _LOWEST) - tl.max(tl.maximum(b_top, _LOWEST), 0)
        b_exp = _wait_for_words(p_words, PARTS, PADDED).to(tl.int32).to(tl.float32, bitcast=True)
        b_mean = tl.exp2((b_below - log_sum) * _LOG2E) * (b_mean + tl.maximum(b_below, -10000.0) * b_exp)
        mean = tl.sum(tl.where(o_c < PARTS, b_mean, 0.0), 0)
    loss = lse_weight * log_sum - linear + Z_LOSS * lse * lse if V == TOTAL else linear
    _store_fields(
        p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean,
        i_n, loss, z_max, log_sum, lse_weight, start + best, mean, True,
    )  # fmt: skip


@triton.jit
def _store_fields(
    p_loss, p_largest, p_log_sum, p_lse_weight, p_prediction, p_mean,
    i_n, loss, largest, log_sum, lse_weight, prediction, mean, mask,
):  # fmt: skip
    """Store the results of row i_n whose pointers are not None."""
    tl.store(p_loss + i_n, loss, mask=mask)
    if p_largest is not None:
        tl.store(p_largest + i_n, largest, mask=mask)
    if p_log_sum is not None:
        tl.store(p_log_sum + i_n, log_sum, mask=mask)
    if p_lse_weight is not None:
        tl.store(p_lse_weight + i_n, lse_weight, mask=mask)
    if p_prediction is not None:
        tl.store(p_prediction + i_n, prediction, mask=mask)
    if p_mean is not None:
        tl.store(p_mean + i_n, mean, mask=mask)
