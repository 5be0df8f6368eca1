"""The kernel of `cross_entropy` and `linear_cross_entropy`: losses of rows of logits, and their gradients.

Axes: N rows, V vocabulary entries, parts of a row. The gradient of a part needs the maximum and the sum of exponentials
of its whole row, so logits are read twice; the second reading comes out of L2, which leaves 4 bytes per logit in bf16,
one read and one write, for memory. To that end program i takes the statistics of part i, but the gradient of part
i - lag: by then the programs of that row are done, and its logits are still in L2. The statistics travel through one
word of memory per part. The formulas stand in `cross_entropy`.

A program waits only for programs before it, and a GPU starts programs in the order of their numbers, as prefix sums by
look-back need it, too: none waits in vain, however few run at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# What is subtracted as a maximum at the least: finite also where all logits are masked by -inf.
LOWEST = -1e30
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


@triton.jit
def _tanh(b_u):
    """tanh to 2e-7 relative: an odd polynomial near zero, where the exponential form would cancel."""
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
def _cap(b_z, SOFTCAP: tl.constexpr):
    b_z = b_z.to(tl.float32)
    if SOFTCAP > 0.0:
        b_z = SOFTCAP * _tanh(b_z / SOFTCAP)
    return b_z


@triton.jit
def _slope(b_x, SOFTCAP: tl.constexpr):
    """The derivative of `_cap`, without the cancellation of 1 - tanh²."""
    b_slope = 1.0
    if SOFTCAP > 0.0:
        b_e = tl.exp(-2.0 / SOFTCAP * tl.abs(b_x.to(tl.float32)))
        b_r = 1.0 / (1.0 + b_e)
        b_slope = 4.0 * b_e * b_r * b_r
    return b_slope


@triton.jit
def _inside(o_v, V: tl.constexpr):
    return (o_v >= 0) & (o_v < V)


@triton.jit
def _class_weights(p_weight, o_v, V: tl.constexpr):
    """The weights of the classes, zero outside of the vocabulary; the scalar one without weights."""
    b_w = 1.0
    if p_weight is not None:
        b_w = tl.load(p_weight + o_v, mask=_inside(o_v, V), other=0.0)
    return b_w


@triton.jit
def _gradient(
    b_x, z_max, log_sum, b_w, b_one_hot, scale, factor,
    TOTAL: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """scale · dloss/dlogit of logits x; factor is scale times what multiplies the probabilities. Blocks or scalars."""
    # One after the other: the sum of both has the digits of the larger one alone.
    b_dz = tl.exp2((_cap(b_x, SOFTCAP) - z_max - log_sum) * _LOG2E) * factor - b_one_hot
    if SMOOTHING > 0.0:
        b_dz -= b_w * (SMOOTHING / TOTAL * scale)
    return b_dz * _slope(b_x, SOFTCAP)


@triton.jit
def _word(high, low):
    """An fp32 and 32 bits in one word of memory, which other programs see as a whole."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def _bits(x):
    """The lower half of such a word from an fp32."""
    return x.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _spread(condition, BLOCK: tl.constexpr):
    """A scalar condition for every element of a block; the interpreter cannot combine the two kinds of masks."""
    return tl.full([BLOCK], condition.to(tl.int32), tl.int32) != 0


@triton.jit
def _wait(p_words, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """The words of a row's parts, once all are there; 0 is none yet."""
    o_c = tl.arange(0, PADDED)
    b_word = tl.load(p_words + o_c, mask=o_c < PARTS, other=1, volatile=True)
    while tl.min((b_word != 0).to(tl.int32), 0) == 0:
        b_word = tl.load(p_words + o_c, mask=o_c < PARTS, other=1, volatile=True)
    return b_word


@triton.jit
def _row(i_n, n_inner, stride_outer, stride_inner, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """(where row i_n starts, at a multiple of GROUP, how far its first column is behind that, where it ends)."""
    start = (i_n // n_inner).to(tl.int64) * stride_outer + (i_n % n_inner).to(tl.int64) * stride_inner
    shift = 0
    end = WIDTH
    if GROUP > 1:
        shift = (start % GROUP).to(tl.int32)
        start = tl.multiple_of(start - shift, GROUP)
        end = tl.multiple_of((shift + WIDTH + GROUP - 1) // GROUP * GROUP, GROUP)
    return start, shift, end


@triton.jit
def _publish(
    b_x, o_v, p_word, p_weight, n_parts,
    V: tl.constexpr, MORE: tl.constexpr, BEYOND: tl.constexpr,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, PREDICT: tl.constexpr,
):  # fmt: skip
    """Store the words of one part: its maximum and sum, and where wanted its weighted sum and its largest column.

    The weighted sum is that of logits less their maximum, with the sum of the weights. The column of the largest logit
    is counted from V on, that of a NaN, which is larger than any number to `argmax`, from 0.
    """
    if MORE:
        b_x = tl.where(_inside(o_v, V), b_x, 0.0)
    b_z = _cap(b_x, SOFTCAP)
    b_inside = b_z if BEYOND != 0.0 else tl.where(_inside(o_v, V), b_z, -float("inf"))
    z_most = tl.max(b_inside, 0)
    z_max = tl.maximum(z_most, _LOWEST)
    z_exp = tl.sum(tl.exp2((b_inside - z_max) * _LOG2E), 0)
    if SMOOTHING > 0.0:
        b_w = tl.where(_inside(o_v, V), _class_weights(p_weight, o_v, V), 0.0)
        z_sum = tl.sum(tl.where(_inside(o_v, V), b_w * (b_z - z_max), 0.0), 0)
        tl.store(p_word + n_parts, _word(z_sum, _bits(tl.sum(b_w, 0)) + 1))
    if PREDICT:
        b_best = tl.where(_inside(o_v, V) & (b_inside == z_most), V + o_v, 2 * V)
        best = tl.min(tl.where(b_inside != b_inside, o_v, b_best), 0)
        tl.store(p_word + 2 * n_parts, best.to(tl.int64) + 1)
    tl.store(p_word, _word(z_most, _bits(z_exp)))


@triton.jit(do_not_specialize=["n_parts", "lag", "n_inner"])
def cross_entropy_kernel(
    p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_loss, p_largest, p_log_sum, p_share, p_prediction, p_words,
    n_parts, lag, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz, stride_scale, ignore_index, start,
    V: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of one part and the statistics of a later one; one program of a row writes the row's results.

    Without STATISTICS, largest, log_sum and share are read. V < TOTAL is a shard of the vocabulary: what is stored in
    place of the loss is then its part that is linear in the logits. A GROUP of logits is 16 bytes, where rows are not
    made of them: all groups that a row has a part in are read whole, and never lie on two pages.
    """
    # Whether more is read than a row's columns.
    MORE: tl.constexpr = WIDTH > V or GROUP > 1
    # Beyond the last column, -inf has no part in maximum and sum; only these can do with it.
    BEYOND: tl.constexpr = 0.0 if SMOOTHING > 0.0 or SOFTCAP > 0.0 or MORE else -float("inf")
    i_a = tl.program_id(0)
    i_b = i_a - lag
    if STATISTICS:
        # Asked for early, needed late.
        o_a = i_a % PARTS * BLOCK + tl.arange(0, BLOCK)
        counted_a = tl.load(p_target + i_a // PARTS, mask=i_a < n_parts, other=ignore_index) != ignore_index
        start_a, shift_a, end_a = _row(i_a // PARTS, n_inner, stride_z_outer, stride_z, WIDTH, GROUP)
        b_a = tl.load(p_z + start_a + o_a, mask=(o_a < end_a) & _spread(counted_a, BLOCK), other=BEYOND)
    if i_b >= 0:
        _finish(
            p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_loss, p_largest, p_log_sum, p_share, p_prediction,
            p_words, i_b // PARTS, i_b % PARTS, n_parts, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz,
            stride_scale, ignore_index, start,
            V, WIDTH, TOTAL, SMOOTHING, Z_LOSS, SOFTCAP, STATISTICS, GRADIENT, PARTS, PADDED, BLOCK, GROUP,
        )  # fmt: skip
    if STATISTICS and counted_a:
        PREDICT: tl.constexpr = p_prediction is not None
        _publish(b_a, o_a - shift_a, p_words + i_a, p_weight, n_parts, V, MORE, BEYOND, SMOOTHING, SOFTCAP, PREDICT)


@triton.jit
def _finish(
    p_z, p_dz, p_target, p_weight, p_weight_sum, p_scale, p_loss, p_largest, p_log_sum, p_share, p_prediction, p_words,
    i_n, i_c, n_parts, n_inner, stride_z_outer, stride_z, stride_dz_outer, stride_dz, stride_scale, ignore_index, start,
    V: tl.constexpr, WIDTH: tl.constexpr, TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of part i_c of row i_n, and the row's results if this is the part to write them."""
    target = tl.load(p_target + i_n)
    o_b = i_c * BLOCK + tl.arange(0, BLOCK)
    if GRADIENT:
        start_dz, shift, end = _row(i_n, n_inner, stride_dz_outer, stride_dz, WIDTH, GROUP)
        p_dz += start_dz
    if target == ignore_index:
        if GRADIENT:
            _store(p_dz, i_c * BLOCK, tl.zeros([BLOCK], tl.float32), shift, end, V, GROUP, BLOCK)
        if STATISTICS:
            _store_row(p_loss, p_largest, p_log_sum, p_share, p_prediction, i_n, 0.0, 0.0, 0.0, 0.0, -1, i_c == 0)
    elif GRADIENT or i_c == 0:
        start_z, shift, end = _row(i_n, n_inner, stride_z_outer, stride_z, WIDTH, GROUP)
        p_z += start_z
        if GRADIENT:
            b_x = tl.load(p_z + o_b, mask=o_b < end, other=0.0, eviction_policy="evict_first")
            scale = tl.load(p_scale + i_n.to(tl.int64) * stride_scale)
        # A target outside the vocabulary is the caller's bug; there is no way to raise, so the row turns to NaN.
        poison = tl.where((target >= 0) & (target < TOTAL), 0.0, float("nan"))
        column = target - start
        inside = (column >= 0) & (column < V)
        here = inside & ((column + shift) // BLOCK == i_c)
        first = i_c == 0
        ends = here | (first & (inside == 0)) if GRADIENT else first
        x_target = tl.load(p_z + shift + column, mask=ends & inside, other=0.0)
        target_weight = 1.0
        share = 1.0
        if p_weight is not None:
            target_weight = tl.load(p_weight + column, mask=inside, other=0.0)

        if STATISTICS:
            p_words += i_n * PARTS
            z_max, log_sum, b_most = _row_statistics(p_words, PARTS, PADDED)
            if p_weight is not None:
                share = (1.0 - SMOOTHING) * target_weight
                if SMOOTHING > 0.0:
                    share += SMOOTHING / TOTAL * tl.load(p_weight_sum)
            elif V < TOTAL:
                share = tl.where(inside, 1.0 - SMOOTHING, 0.0) + SMOOTHING * V / TOTAL
            if ends:
                linear = (1.0 - SMOOTHING) * target_weight * (_cap(x_target, SOFTCAP) - z_max)
                linear = tl.where(inside, linear, 0.0)
                _row_results(
                    p_loss, p_largest, p_log_sum, p_share, p_prediction, p_words, i_n, n_parts, start,
                    z_max, log_sum, b_most, linear + poison, share, V, TOTAL, SMOOTHING, Z_LOSS, PARTS, PADDED,
                )  # fmt: skip
        else:
            z_max = tl.load(p_largest + i_n)
            log_sum = tl.load(p_log_sum + i_n)
            if p_share is not None:
                share = tl.load(p_share + i_n)

        if GRADIENT:
            scale += poison
            factor = (share + 2.0 * Z_LOSS * (z_max + log_sum)) * scale
            o_v = o_b - shift
            if WIDTH > V or GROUP > 1:
                b_x = tl.where(_inside(o_v, V), b_x, 0.0)
            b_w = _class_weights(p_weight, o_v, V) if SMOOTHING > 0.0 else 0.0
            b_dz = _gradient(b_x, z_max, log_sum, b_w, 0.0, scale, factor, TOTAL, SMOOTHING, SOFTCAP)
            if here:
                # The target's logit has been read by the thread that will need it before another one overwrites it.
                tl.debug_barrier()
            _store(p_dz, i_c * BLOCK, b_dz, shift, end, V, GROUP, BLOCK)
            if here:
                # One element of the row differs from the others; it is written over what was just stored.
                tl.debug_barrier()
                one_hot = (1.0 - SMOOTHING) * target_weight * scale
                dz = _gradient(
                    x_target, z_max, log_sum, target_weight, one_hot, scale, factor, TOTAL, SMOOTHING, SOFTCAP
                )  # fmt: skip
                tl.store(p_dz + shift + column, dz.to(p_dz.dtype.element_ty))


@triton.jit
def _store(p_dz, first, b_dz, shift, end, V: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Store one part of a row; of groups that are shared with another row, its own columns alone."""
    b_dz = b_dz.to(p_dz.dtype.element_ty)
    o_b = first + tl.arange(0, BLOCK)
    if GROUP == 1:
        tl.store(p_dz + o_b, b_dz, mask=o_b < end, eviction_policy="evict_first")
    elif (first >= shift) & (first + BLOCK <= shift + V):
        tl.store(p_dz + o_b, b_dz, eviction_policy="evict_first")
    else:
        tl.store(p_dz + o_b, b_dz, mask=_inside(o_b - shift, V), eviction_policy="evict_first")


@triton.jit
def _row_statistics(p_words, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """What to subtract from a row, log Σ exp of what is left, and the maxima of its parts."""
    o_c = tl.arange(0, PADDED)
    b_word = _wait(p_words, PARTS, PADDED)
    b_most = tl.where(o_c < PARTS, (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    b_max = tl.maximum(b_most, _LOWEST)
    b_exp = tl.where(o_c < PARTS, b_word.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    z_max = tl.max(b_max, 0)
    return z_max, tl.log2(tl.sum(b_exp * tl.exp2((b_max - z_max) * _LOG2E), 0)) * _LN2, b_most


@triton.jit
def _row_results(
    p_loss, p_largest, p_log_sum, p_share, p_prediction, p_words, i_n, n_parts, start,
    z_max, log_sum, b_most, linear, share,
    V: tl.constexpr, TOTAL: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store what is wanted of row i_n; linear is the target's part of what is linear in the logits, less z_max."""
    o_c = tl.arange(0, PADDED)
    if SMOOTHING > 0.0:
        b_word = _wait(p_words + n_parts, PARTS, PADDED)
        b_sum = (b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        b_weight = (b_word.to(tl.int32) - 1).to(tl.float32, bitcast=True)
        b_sum += b_weight * (tl.maximum(b_most, _LOWEST) - z_max)
        linear += SMOOTHING / TOTAL * tl.sum(tl.where(o_c < PARTS, b_sum, 0.0), 0)
    lse = z_max + log_sum
    best = 0
    if p_prediction is not None:
        b_word = _wait(p_words + 2 * n_parts, PARTS, PADDED)
        b_best = b_word.to(tl.int32) - 1
        is_best = (b_best < V) | (b_most == tl.max(b_most, 0))
        best = tl.min(tl.where(is_best & (o_c < PARTS), b_best, 2 * V), 0)
        # Other shards see by it that this one has a NaN.
        z_max = tl.where(best < V, float("nan"), z_max)
        best = best % V
    loss = share * log_sum - linear + Z_LOSS * lse * lse if V == TOTAL else linear
    _store_row(
        p_loss, p_largest, p_log_sum, p_share, p_prediction, i_n, loss, z_max, log_sum, share, start + best, True
    )  # fmt: skip


@triton.jit
def _store_row(
    p_loss, p_largest, p_log_sum, p_share, p_prediction, i_n, loss, largest, log_sum, share, prediction, mask
):  # fmt: skip
    """The results of row i_n, those that are wanted."""
    tl.store(p_loss + i_n, loss, mask=mask)
    if p_largest is not None:
        tl.store(p_largest + i_n, largest, mask=mask)
    if p_log_sum is not None:
        tl.store(p_log_sum + i_n, log_sum, mask=mask)
    if p_share is not None:
        tl.store(p_share + i_n, share, mask=mask)
    if p_prediction is not None:
        tl.store(p_prediction + i_n, prediction, mask=mask)
