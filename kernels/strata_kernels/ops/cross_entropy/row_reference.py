"""Losses of rows of logits and their gradients in plain PyTorch: on CPUs, in fp64 and under `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .row_kernel import LOWEST
from .row_statistics import Columns, Options, Statistics


def reference_losses(z: Tensor, target: Tensor, options: Options, weight: Tensor | None) -> Tensor:
    """The losses [N] of logits z [N, V] by operators of PyTorch, which transforms of `torch.func` can differentiate."""
    wide = _softcapped(z, options.softcap)
    losses = functional.cross_entropy(
        wide, target, weight, ignore_index=options.ignore_index, reduction="none",
        label_smoothing=options.label_smoothing,
    )  # fmt: skip
    # The square may be infinite where a row is masked with the smallest number, and 0 times that would be NaN.
    if not options.z_loss:
        return losses
    squares = options.z_loss * wide.logsumexp(-1).square()
    return losses + squares.where(target != options.ignore_index, 0.0)


def reference_statistics(
    z: Tensor, target: Tensor, options: Options, columns: Columns, weight: Tensor | None, predict: bool
) -> Statistics:
    """`Statistics` of logits z [N, V] that have these columns of the vocabulary."""
    counted, has_target, column = _targets(target, options, columns, z.shape[1])
    smoothing, wide = options.label_smoothing, _softcapped(z, options.softcap)
    largest, prediction = wide.max(1, keepdim=True)
    below = wide - largest.clamp_min(LOWEST)
    target_weight = 1.0 if weight is None else weight[column]
    linear = ((1 - smoothing) * target_weight * below.gather(1, column)).where(has_target, 0)
    if smoothing:
        linear += smoothing / columns.total * (below if weight is None else below * weight).sum(1, keepdim=True)

    def rows(x: Tensor) -> Tensor:
        return x.where(counted, 0)[:, 0]

    lse_weight = None
    if weight is not None or z.shape[1] < columns.total:
        sum_of_weights = z.shape[1] if weight is None else weight.sum()
        lse_weight = torch.full_like(largest, 1 - smoothing) * (1.0 if weight is None else weight[column])
        lse_weight = rows(lse_weight.where(has_target, 0) + smoothing / columns.total * sum_of_weights)
    # On a CPU log_softmax is more exact than logsumexp; it is NaN where all logits are -inf.
    log_sum = below.log_softmax(1).gather(1, prediction).neg().where(largest != -torch.inf, -torch.inf)
    return Statistics(
        largest=rows(largest.clamp_min(LOWEST)),
        log_sum=rows(log_sum),
        linear=rows(linear),
        lse_weight=lse_weight,
        prediction=(prediction + columns.start).where(counted, -1)[:, 0] if predict else None,
    )


def reference_gradient(
    z: Tensor, target: Tensor, scale: Tensor, largest: Tensor, log_sum: Tensor, lse_weight: Tensor | None,
    options: Options, columns: Columns, weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """scale · dloss/dz [N, V] for logits z of these columns, from statistics of the whole vocabulary."""
    counted, has_target, column = _targets(target, options, columns, z.shape[1])
    smoothing, wide = options.label_smoothing, _softcapped(z, options.softcap)
    largest, log_sum = largest[:, None], log_sum[:, None]
    factor = (1.0 if lse_weight is None else lse_weight[:, None]) + 2 * options.z_loss * (largest + log_sum)
    dz = (wide - largest).sub_(log_sum).exp_().mul_(factor)
    one_hot = torch.full_like(largest, smoothing - 1) * (1.0 if weight is None else weight[column])
    dz.scatter_add_(1, column, one_hot.where(has_target, 0))
    if smoothing:
        dz.sub_(smoothing / columns.total * (1.0 if weight is None else weight))
    dz.mul_(scale[:, None])
    if options.softcap:
        dz.mul_(1 - (wide / options.softcap).square_())
    return dz.where(counted, 0)


def _softcapped(z: Tensor, softcap: float) -> Tensor:
    wide = z.to(accumulator(z.dtype))
    return softcap * torch.tanh(wide / softcap) if softcap else wide


def _targets(target: Tensor, options: Options, columns: Columns, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(row is not ignored, its target is in these columns, its column here or 0), each [N, 1]."""
    counted = (target != options.ignore_index)[:, None]
    column = target[:, None] - columns.start
    if bool((counted & ((target < 0) | (target >= columns.total))[:, None]).any()):
        raise IndexError(f"target is out of bounds for {columns.total} classes")
    has_target = counted & (column >= 0) & (column < width)
    return counted, has_target, column.where(has_target, 0)
