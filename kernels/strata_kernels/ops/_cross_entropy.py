"""Cross entropy of rows of logits, which it overwrites by their gradients: the middle of `linear_cross_entropy`.

Axes: N rows, V vocabulary entries. One program takes one row, whose logits it reads twice and writes once; 6 bytes per
logit in bf16, 4 of them where the second reading comes out of L2. The formulas stand in `linear_cross_entropy`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import accumulator, launch, takes_kernel

# Rows of the buffer start at multiples of this many elements: the matrix products and the kernel then move 16 bytes.
_ALIGNMENT = 64

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
def _gradient(
    b_z, o_v, p_weight, target, target_weight, lse, share, scale,
    V: tl.constexpr, TOTAL: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    b_dz = tl.exp2((b_z - lse) * _LOG2E) * (share + 2.0 * Z_LOSS * lse)
    b_dz -= tl.where(o_v == target, (1.0 - SMOOTHING) * target_weight, 0.0)
    if SMOOTHING > 0.0:
        b_dz -= SMOOTHING / TOTAL * _class_weights(p_weight, o_v, V)
    b_dz *= scale
    if SOFTCAP > 0.0:
        b_z = b_z / SOFTCAP
        b_dz *= 1.0 - b_z * b_z
    return b_dz


@triton.jit
def _class_weights(p_weight, o_v, V: tl.constexpr):
    """The weights of the classes, zero beyond the last; the scalar one without weights."""
    if p_weight is None:
        return 1.0
    return tl.load(p_weight + o_v, mask=o_v < V, other=0.0)


@triton.jit
def cross_entropy_kernel(
    p_z, p_target, p_weight, p_scale, p_loss, p_lse, p_share, p_largest, p_prediction,
    stride_z, stride_scale, ignore_index, start,
    V: tl.constexpr, V_PADDED: tl.constexpr, TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and dz in place of its logits.

    The row's last block stays in registers between the two walks, and the second walk goes backwards, so that it meets
    first what the first one left in L2. Without STATISTICS, lse and share are read. V < TOTAL is a shard of the
    vocabulary: what is stored in place of the loss is then its part that is linear in the logits.
    """
    i_n = tl.program_id(0).to(tl.int64)
    p_z += i_n * stride_z
    target = tl.load(p_target + i_n)
    TAIL: tl.constexpr = (V - 1) // BLOCK * BLOCK
    o_b = tl.arange(0, BLOCK)
    o_t = TAIL + o_b
    # The buffer's padding may be read: a mask at its end, a multiple of 16 bytes, keeps the loads vectorized.
    m_t = o_t < V_PADDED
    if target == ignore_index:
        if GRADIENT:
            b_zero = tl.zeros([BLOCK], p_z.dtype.element_ty)
            for i_v in range(0, TAIL, BLOCK):
                tl.store(p_z + i_v + o_b, b_zero)
            tl.store(p_z + o_t, b_zero, mask=m_t)
        if STATISTICS:
            tl.store(p_loss + i_n, 0.0)
            if p_lse is not None:
                tl.store(p_lse + i_n, 0.0)
            if p_share is not None:
                tl.store(p_share + i_n, 0.0)
            if p_largest is not None:
                tl.store(p_largest + i_n, 0.0)
            if p_prediction is not None:
                tl.store(p_prediction + i_n, -1)
        return

    # A target outside the vocabulary is the caller's bug; there is no way to raise from here, so the row turns to NaN.
    poison = tl.where((target >= 0) & (target < TOTAL), 0.0, float("nan"))
    target -= start
    here = (target >= 0) & (target < V)
    target_weight = 1.0
    if p_weight is not None:
        target_weight = tl.load(p_weight + target, mask=here, other=0.0)
    b_tail = tl.where(o_t < V, tl.load(p_z + o_t, mask=m_t, other=0.0), 0.0)

    if STATISTICS:
        z_target = _cap(tl.load(p_z + target, mask=here, other=0.0), SOFTCAP)
        # Finite, so that a block of nothing but -inf (a masked part of the vocabulary) does not subtract infinities.
        z_max = -1e30
        z_exp = 0.0
        z_sum = 0.0
        w_sum = 0.0
        best = 0
        for i_v in tl.range(0, TAIL, BLOCK, num_stages=STAGES):
            b_z = _cap(tl.load(p_z + i_v + o_b), SOFTCAP)
            b_max = tl.max(b_z, 0)
            if p_prediction is not None and b_max > z_max:
                best = tl.min(tl.where(b_z == b_max, i_v + o_b, V), 0)
            m_new = tl.maximum(z_max, b_max)
            z_exp = z_exp * tl.exp2((z_max - m_new) * _LOG2E) + tl.sum(tl.exp2((b_z - m_new) * _LOG2E), 0)
            z_max = m_new
            if SMOOTHING > 0.0:
                b_w = _class_weights(p_weight, i_v + o_b, V)
                z_sum += tl.sum(b_w * b_z, 0)
                if p_weight is not None:
                    w_sum += tl.sum(b_w, 0)
        b_z = tl.where(o_t < V, _cap(b_tail, SOFTCAP), -float("inf"))
        b_max = tl.max(b_z, 0)
        if p_prediction is not None and b_max > z_max:
            best = tl.min(tl.where(b_z == b_max, o_t, V), 0)
        m_new = tl.maximum(z_max, b_max)
        z_exp = z_exp * tl.exp2((z_max - m_new) * _LOG2E) + tl.sum(tl.exp2((b_z - m_new) * _LOG2E), 0)
        if SMOOTHING > 0.0:
            b_w = _class_weights(p_weight, o_t, V)
            z_sum += tl.sum(tl.where(o_t < V, b_w * b_z, 0.0), 0)
            if p_weight is not None:
                w_sum += tl.sum(b_w, 0)

        lse = m_new + tl.log2(z_exp) * _LN2
        linear = (1.0 - SMOOTHING) * target_weight * z_target + SMOOTHING / TOTAL * z_sum
        share = 1.0
        if p_weight is not None:
            share = (1.0 - SMOOTHING) * target_weight + SMOOTHING / TOTAL * w_sum
        if V == TOTAL:
            tl.store(p_loss + i_n, share * lse - linear + Z_LOSS * lse * lse + poison)
        else:
            tl.store(p_loss + i_n, linear + poison)
        if p_lse is not None:
            tl.store(p_lse + i_n, lse)
        if p_share is not None:
            tl.store(p_share + i_n, share)
        if p_largest is not None:
            tl.store(p_largest + i_n, m_new)
        if p_prediction is not None:
            tl.store(p_prediction + i_n, start + best)
    else:
        lse = tl.load(p_lse + i_n)
        share = 1.0
        if p_share is not None:
            share = tl.load(p_share + i_n)

    if GRADIENT:
        scale = tl.load(p_scale + i_n * stride_scale) + poison
        b_z = _cap(b_tail, SOFTCAP)
        b_dz = _gradient(
            b_z, o_t, p_weight, target, target_weight, lse, share, scale, V, TOTAL, SMOOTHING, Z_LOSS, SOFTCAP
        )
        tl.store(p_z + o_t, b_dz.to(p_z.dtype.element_ty), mask=m_t)
        for i_v in tl.range(BLOCK, TAIL + BLOCK, BLOCK, num_stages=STAGES):
            o_v = TAIL - i_v + o_b
            b_z = _cap(tl.load(p_z + o_v), SOFTCAP)
            b_dz = _gradient(
                b_z, o_v, p_weight, target, target_weight, lse, share, scale, V, TOTAL, SMOOTHING, Z_LOSS, SOFTCAP
            )
            tl.store(p_z + o_v, b_dz.to(p_z.dtype.element_ty))


def _tile(vocabulary: int) -> tuple[int, int, int]:
    """(BLOCK, warps, stages) for a row.

    A thread holds 32 elements of a block. On an H200, 2048 rows of 128256 bf16 logits took 0.374 ms with 8192 elements,
    8 warps and 4 stages, against 0.385 with 4096, 0.406 with 16384 and 0.377 with 32768 elements unpipelined.
    """
    block = min(max(triton.next_power_of_2(vocabulary), 256), 8192)
    return block, max(block // 1024, 1), 4


@dataclass(frozen=True)
class Options:
    """What shapes the loss of a row; a softcap of 0.0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


@dataclass(frozen=True)
class Shard:
    """The columns of the vocabulary that a process holds: those from `start` on, of `total`."""

    start: int
    total: int


class Statistics(NamedTuple):
    """What a shard of the vocabulary adds to the losses of the rows, each [N], fp32 (fp64 for fp64); ignored rows: 0.

    lse: log Σ_v exp z_v over the shard's columns; over all shards it is the logsumexp of theirs.
    linear: (1 - ε) w_target z_target + (ε / V) Σ_v w_v z_v over the shard's columns; over all shards the sum of theirs.
    share: (1 - ε) w_target + (ε / V) Σ_v w_v, likewise; None without class weights, where it is one over all shards.
    largest: the largest logit; None unless asked for.
    prediction: int64, the first of its columns, counted in the whole vocabulary; -1 in ignored rows; None likewise.
    """

    lse: Tensor
    linear: Tensor
    share: Tensor | None
    largest: Tensor | None
    prediction: Tensor | None


def padded(vocabulary: int) -> int:
    """Elements from one row of a buffer of logits to the next."""
    return -(-vocabulary // _ALIGNMENT) * _ALIGNMENT


def cross_entropy_rows(
    z: Tensor, target: Tensor, scale: Tensor, loss: Tensor, options: Options, gradient: bool,
    *, weight: Tensor | None = None, prediction: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `loss` with the losses of the rows and, if asked, overwrite `z` by scale · dloss/dz.

    Args:
        z: [N, V], the leading columns of a buffer with `padded(V)` of them; bf16 | fp16 | fp32 (fp64 in plain PyTorch).
        target: [N], int64, contiguous.
        scale: [N], of loss's dtype; expanded scalars too. Not read without `gradient`.
        loss: [N], fp32 (fp64 for fp64).
        options: what shapes the loss.
        gradient: whether z is overwritten; it is left in no particular state otherwise.
        weight: [V], of loss's dtype, contiguous: the classes' weights.
        prediction: [N], int64, filled with the first column of each row's largest logit; -1 for an ignored row.
    """
    n_rows = z.shape[0]
    if takes_kernel(z):
        _launch(z, target, scale, loss, options, Shard(0, z.shape[1]), weight, gradient, prediction=prediction)
        return
    found = shard_statistics(z, target, options, Shard(0, z.shape[1]), weight=weight, predict=prediction is not None)
    loss.copy_(shard_loss(found, target, options))
    if prediction is not None and found.prediction is not None:
        prediction.copy_(found.prediction)
    if gradient and n_rows:
        shard_gradient(z, target, scale, found.lse, found.share, options, Shard(0, z.shape[1]), weight=weight)


def shard_statistics(
    z: Tensor, target: Tensor, options: Options, shard: Shard, *, weight: Tensor | None = None, predict: bool = False
) -> Statistics:
    """What a shard's logits z [N, V of the shard] add to the losses; z is only read.

    Arguments as in `cross_entropy_rows`: target counts in the whole vocabulary, weight is of the shard's classes.
    """
    dtype, n_rows = accumulator(z.dtype), z.shape[0]

    def rows(wanted: bool, dtype: torch.dtype = dtype) -> Tensor | None:
        return z.new_empty(n_rows, dtype=dtype) if wanted else None

    lse, linear = z.new_empty(n_rows, dtype=dtype), z.new_empty(n_rows, dtype=dtype)
    share, largest, prediction = rows(weight is not None), rows(predict), rows(predict, torch.int64)
    found = Statistics(lse, linear, share, largest, prediction)
    if takes_kernel(z):
        _launch(
            z, target, None, linear, options, shard, weight, False,
            lse=lse, share=share, largest=largest, prediction=prediction,
        )  # fmt: skip
        return found
    return _reference_statistics(z, target, options, shard, weight, predict)


def shard_gradient(
    z: Tensor, target: Tensor, scale: Tensor, lse: Tensor, share: Tensor | None, options: Options, shard: Shard,
    *, weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Overwrite a shard's logits z by scale · dloss/dz, from lse and share [N] of the whole vocabulary."""
    if takes_kernel(z):
        _launch(z, target, scale, None, options, shard, weight, True, lse=lse, share=share, statistics=False)
        return
    _reference_gradient(z, target, scale, lse, share, options, shard, weight)


def shard_loss(whole: Statistics, target: Tensor, options: Options) -> Tensor:
    """The losses of the rows [N] from statistics of the whole vocabulary: those of the shards, combined."""
    lse = whole.lse if whole.share is None else whole.share * whole.lse
    loss = lse - whole.linear + options.z_loss * whole.lse.square()
    return loss.where(target != options.ignore_index, 0.0)


def _launch(
    z: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor | None, options: Options, shard: Shard,
    weight: Tensor | None, gradient: bool, *, statistics: bool = True, lse: Tensor | None = None,
    share: Tensor | None = None, largest: Tensor | None = None, prediction: Tensor | None = None,
) -> None:  # fmt: skip
    vocabulary = z.shape[1]
    block, warps, stages = _tile(vocabulary)
    launch(
        cross_entropy_kernel, (z.shape[0],),
        z, target, weight, scale, loss, lse, share, largest, prediction,
        z.stride(0), 0 if scale is None else scale.stride(0), options.ignore_index, shard.start,
        V=vocabulary, V_PADDED=padded(vocabulary), TOTAL=shard.total,
        SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
        STATISTICS=statistics, GRADIENT=gradient, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip


def _capped(z: Tensor, softcap: float) -> Tensor:
    wide = z.to(accumulator(z.dtype))
    return softcap * torch.tanh(wide / softcap) if softcap else wide


def _local(target: Tensor, options: Options, shard: Shard, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that count, rows whose target is in the shard, column in the shard or 0), each [N, 1]."""
    counted = (target != options.ignore_index)[:, None]
    column = target[:, None] - shard.start
    if bool((counted & ((target < 0) | (target >= shard.total))[:, None]).any()):
        raise IndexError(f"target is out of bounds for {shard.total} classes")
    here = counted & (column >= 0) & (column < width)
    return counted, here, column.where(here, 0)


def _reference_statistics(
    z: Tensor, target: Tensor, options: Options, shard: Shard, weight: Tensor | None, predict: bool
) -> Statistics:
    counted, here, column = _local(target, options, shard, z.shape[1])
    smoothing, wide = options.label_smoothing, _capped(z, options.softcap)
    target_weight = 1.0 if weight is None else weight[column]
    linear = ((1 - smoothing) * target_weight * wide.gather(1, column)).where(here, 0)
    if smoothing:
        linear += smoothing / shard.total * (wide if weight is None else wide * weight).sum(1, keepdim=True)

    def rows(x: Tensor) -> Tensor:
        return x.where(counted, 0)[:, 0]

    share = None
    if weight is not None:
        share = rows(((1 - smoothing) * weight[column]).where(here, 0) + smoothing / shard.total * weight.sum())
    largest, prediction = wide.max(1, keepdim=True)
    return Statistics(
        # On a CPU log_softmax sums more exactly than logsumexp.
        lse=rows(largest - wide.log_softmax(1).gather(1, prediction)),
        linear=rows(linear),
        share=share,
        largest=rows(largest) if predict else None,
        prediction=(prediction + shard.start).where(counted, -1)[:, 0] if predict else None,
    )


def _reference_gradient(
    z: Tensor, target: Tensor, scale: Tensor, lse: Tensor, share: Tensor | None, options: Options, shard: Shard,
    weight: Tensor | None,
) -> None:  # fmt: skip
    counted, here, column = _local(target, options, shard, z.shape[1])
    smoothing, wide, lse = options.label_smoothing, _capped(z, options.softcap), lse[:, None]
    dz = (wide - lse).exp_().mul_((1.0 if share is None else share[:, None]) + 2 * options.z_loss * lse)
    one_hot = torch.full_like(lse, smoothing - 1) * (1.0 if weight is None else weight[column])
    dz.scatter_add_(1, column, one_hot.where(here, 0))
    if smoothing:
        dz.sub_(smoothing / shard.total * (1.0 if weight is None else weight))
    dz.mul_(scale[:, None])
    if options.softcap:
        dz.mul_(1 - (wide / options.softcap).square_())
    z.copy_(dz.where(counted, 0))
