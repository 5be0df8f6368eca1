"""Losses of rows of logits and their gradients in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .kernels import LOWEST
from .statistics import Options, Shard, Statistics


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


def reference_statistics(
    z: Tensor, target: Tensor, options: Options, shard: Shard, weight: Tensor | None, predict: bool
) -> Statistics:
    """The statistics of logits z [N, V of the shard]."""
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


def reference_gradient(
    z: Tensor, target: Tensor, scale: Tensor, largest: Tensor, log_sum: Tensor, share: Tensor | None,
    options: Options, shard: Shard, weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """scale · dloss/dz for logits z [N, V of the shard], from statistics of the whole vocabulary."""
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
