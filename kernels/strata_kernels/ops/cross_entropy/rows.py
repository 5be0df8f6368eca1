"""Losses of rows of logits and their gradients: what `cross_entropy` and `linear_cross_entropy` are made of.

The kernel, or plain PyTorch where it does not run; whole rows, or the columns that one process holds of them. The
formulas stand in `cross_entropy`, how the work is cut in `kernels`.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator, takes_kernel
from .kernels import LOWEST, Results, launch_rows
from .kernels import Options as Options
from .kernels import Shard as Shard
from .kernels import padded as padded


class Statistics(NamedTuple):
    """What a shard of the vocabulary adds to the losses of the rows, each [N], fp32 (fp64 for fp64); ignored rows: 0.

    Apart, largest and log_sum keep the digits that their sum, the logsumexp, loses where logits are far from zero.

    largest: the largest logit m of the shard's columns, or a finite number where all are -inf; NaN where predictions
        are asked for and a logit is NaN.
    log_sum: log Σ_v exp(z_v - m) over the shard's columns.
    linear: (1 - ε) w_target (z_target - m) + (ε / V) Σ_v w_v (z_v - m) over the shard's columns.
    share: (1 - ε) w_target + (ε / V) Σ_v w_v, likewise; None for one: the whole vocabulary without class weights.
    prediction: int64, the first column of the largest logit, counted in the whole vocabulary; -1 in ignored rows; None
        unless asked for.
    """

    largest: Tensor
    log_sum: Tensor
    linear: Tensor
    share: Tensor | None
    prediction: Tensor | None

    @classmethod
    def combined(cls, parts: Self) -> Self:
        """Those of the whole vocabulary, from fields [shards, N] with the shards in their order."""
        largest = parts.largest.amax(0)
        apart = parts.largest - largest
        assert parts.share is not None
        prediction = None
        if parts.prediction is not None:
            # The first of equal ones, whatever order the device reduces in.
            best = torch.where(largest.isnan(), parts.largest.isnan(), parts.largest == largest)
            prediction = parts.prediction.where(best, torch.iinfo(torch.int64).max).amin(0)
        return cls(
            largest,
            (apart + parts.log_sum).logsumexp(0),
            (parts.linear + parts.share * apart).sum(0),
            parts.share.sum(0),
            prediction,
        )


def rows_of(x: Tensor) -> Tensor:
    """x [..., V] as [A, B, V] with adjacent columns: a view if they are adjacent and two strides lead to its rows."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    axes = [(1, 0), (1, 0)]
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if axes[-1][1] == size * stride and axes[-1][0] > 1:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size != 1:
            axes.append((size, stride))
    if len(axes) > 4 or x.numel() == 0:
        return x.reshape(1, -1, x.shape[-1])
    (outer, stride_outer), (inner, stride_inner) = axes[-2:]
    return x.as_strided((outer, inner, x.shape[-1]), (stride_outer, stride_inner, 1))


def cross_entropy_rows(
    z: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, options: Options, gradient: bool,
    *, weight: Tensor | None = None, dz: Tensor | None = None, largest: Tensor | None = None,
    log_sum: Tensor | None = None, share: Tensor | None = None, prediction: Tensor | None = None, padding: bool = True,
) -> None:  # fmt: skip
    """Fill `loss` with the losses of the rows and, if asked, `dz` with scale · dloss/dz.

    Args:
        z: [N, V], or [A, B, V] with N = A · B; adjacent columns; bf16 | fp16 | fp32 (fp64 in plain PyTorch).
        target: [N], int64, contiguous.
        scale: [N], of loss's dtype; expanded scalars too. Needed for the gradient alone.
        loss: [N], fp32 (fp64 for fp64).
        options: what shapes the loss.
        gradient: whether dz is filled.
        weight: [V], of loss's dtype, contiguous: the classes' weights.
        dz: like z, which is overwritten without it.
        largest, log_sum, share: [N], like loss: filled with what `cross_entropy_gradient` reads; share only with a
            weight.
        prediction: [N], int64, filled with the first column of each row's largest logit; -1 for an ignored row.
        padding: whether z is the leading columns of a buffer with `padded(V)` of them, of which the others may be read,
            and are left in no particular state where z is overwritten.
    """
    whole = Shard(0, z.shape[-1])
    if takes_kernel(z):
        results = Results(loss, largest, log_sum, share, prediction)
        filled = None if not gradient else z if dz is None else dz
        launch_rows(z, target, options, whole, weight, results, scale, filled, padding)
        return
    flat = z.reshape(-1, z.shape[-1])
    found = _reference_statistics(flat, target, options, whole, weight, prediction is not None)
    loss.copy_(shard_loss(found, target, options))
    wanted = (largest, log_sum, None, share, prediction)
    for given, value in zip(wanted, found, strict=True):
        if given is not None and value is not None:
            given.copy_(value)
    if gradient:
        cross_entropy_gradient(
            z, target, scale, found.largest, found.log_sum, found.share, options, weight=weight, dz=dz
        )


def cross_entropy_gradient(
    z: Tensor, target: Tensor, scale: Tensor | None, largest: Tensor, log_sum: Tensor, share: Tensor | None,
    options: Options,
    *, weight: Tensor | None = None, dz: Tensor | None = None, shard: Shard | None = None, padding: bool = True,
) -> None:  # fmt: skip
    """Fill `dz` with scale · dloss/dz from what is known of the rows; arguments as in `cross_entropy_rows`.

    With a shard, z and weight are its part of the vocabulary; largest, log_sum and share are those of the whole.
    """
    assert scale is not None
    shard = shard or Shard(0, z.shape[-1])
    if takes_kernel(z):
        results = Results(None, largest, log_sum, share)
        launch_rows(z, target, options, shard, weight, results, scale, z if dz is None else dz, padding)
        return
    flat = z.reshape(-1, z.shape[-1])
    value = _reference_gradient(flat, target, scale, largest, log_sum, share, options, shard, weight)
    (z if dz is None else dz).copy_(value.view(z.shape))


def shard_statistics(
    z: Tensor, target: Tensor, options: Options, shard: Shard, *, weight: Tensor | None = None, predict: bool = False
) -> Statistics:
    """What a shard's logits z [N, V of the shard] add to the losses; z is only read.

    Arguments as in `cross_entropy_rows`: target counts in the whole vocabulary, weight is of the shard's classes.
    """
    if not takes_kernel(z):
        return _reference_statistics(z, target, options, shard, weight, predict)
    largest, log_sum, linear, share = (z.new_empty(z.shape[0], dtype=accumulator(z.dtype)) for _ in range(4))
    found = Statistics(largest, log_sum, linear, share, torch.empty_like(target) if predict else None)
    results = Results(linear, largest, log_sum, share, found.prediction)
    launch_rows(z, target, options, shard, weight, results, None, None, padding=True)
    return found


def shard_gradient(
    z: Tensor, target: Tensor, scale: Tensor, whole: Statistics, options: Options, shard: Shard,
    *, weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Overwrite a shard's logits z by scale · dloss/dz, from statistics of the whole vocabulary."""
    cross_entropy_gradient(
        z, target, scale, whole.largest, whole.log_sum, whole.share, options, weight=weight, shard=shard
    )


def shard_loss(whole: Statistics, target: Tensor, options: Options) -> Tensor:
    """The losses of the rows [N] from statistics of the whole vocabulary: those of the shards, combined."""
    log_sum = whole.log_sum if whole.share is None else whole.share * whole.log_sum
    loss = log_sum - whole.linear + options.z_loss * (whole.largest + whole.log_sum).square()
    return loss.where(target != options.ignore_index, 0.0)


def plain_losses(z: Tensor, target: Tensor, options: Options, weight: Tensor | None) -> Tensor:
    """The losses [N] of logits z [N, V] in plain PyTorch, which is all that a transform of `torch.func` sees into."""
    wide = _capped(z, options.softcap)
    losses = functional.cross_entropy(
        wide, target, weight, ignore_index=options.ignore_index, reduction="none",
        label_smoothing=options.label_smoothing,
    )  # fmt: skip
    if not options.z_loss:  # The square of what masks leave of a row may be infinite, and zero times that is NaN.
        return losses
    squares = options.z_loss * wide.logsumexp(-1).square()
    return losses + squares.where(target != options.ignore_index, 0.0)


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
    largest, prediction = wide.max(1, keepdim=True)
    below = wide - largest.clamp_min(LOWEST)
    target_weight = 1.0 if weight is None else weight[column]
    linear = ((1 - smoothing) * target_weight * below.gather(1, column)).where(here, 0)
    if smoothing:
        linear += smoothing / shard.total * (below if weight is None else below * weight).sum(1, keepdim=True)

    def rows(x: Tensor) -> Tensor:
        return x.where(counted, 0)[:, 0]

    share = None
    if weight is not None or z.shape[1] < shard.total:
        sum_of_weights = z.shape[1] if weight is None else weight.sum()
        share = torch.full_like(largest, 1 - smoothing) * (1.0 if weight is None else weight[column])
        share = rows(share.where(here, 0) + smoothing / shard.total * sum_of_weights)
    # On a CPU log_softmax sums more exactly than logsumexp; of nothing but -inf it is NaN.
    log_sum = below.log_softmax(1).gather(1, prediction).neg().where(largest != -torch.inf, -torch.inf)
    return Statistics(
        largest=rows(largest.clamp_min(LOWEST)),
        log_sum=rows(log_sum),
        linear=rows(linear),
        share=share,
        prediction=(prediction + shard.start).where(counted, -1)[:, 0] if predict else None,
    )


def _reference_gradient(
    z: Tensor, target: Tensor, scale: Tensor, largest: Tensor, log_sum: Tensor, share: Tensor | None,
    options: Options, shard: Shard, weight: Tensor | None,
) -> Tensor:  # fmt: skip
    counted, here, column = _local(target, options, shard, z.shape[1])
    smoothing, wide = options.label_smoothing, _capped(z, options.softcap)
    largest, log_sum = largest[:, None], log_sum[:, None]
    factor = (1.0 if share is None else share[:, None]) + 2 * options.z_loss * (largest + log_sum)
    dz = (wide - largest).sub_(log_sum).exp_().mul_(factor)
    one_hot = torch.full_like(largest, smoothing - 1) * (1.0 if weight is None else weight[column])
    dz.scatter_add_(1, column, one_hot.where(here, 0))
    if smoothing:
        dz.sub_(smoothing / shard.total * (1.0 if weight is None else weight))
    dz.mul_(scale[:, None])
    if options.softcap:
        dz.mul_(1 - (wide / options.softcap).square_())
    return dz.where(counted, 0)
