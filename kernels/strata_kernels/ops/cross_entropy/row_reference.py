"""Losses of rows of logits and their gradients in plain PyTorch: for CPUs, fp64 and `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from .row_kernel import LOWEST
from .row_statistics import Columns, Options, Statistics


def reference_losses(z: Tensor, target: Tensor, options: Options, weight: Tensor | None) -> Tensor:
    """The losses [N] of logits z [N, V] by PyTorch operators, differentiable by `torch.func`."""
    wide = _shaped(z, options)
    losses = functional.cross_entropy(
        wide, target, weight, ignore_index=options.ignore_index, reduction="none",
        label_smoothing=options.label_smoothing,
    )  # fmt: skip
    # lse² may overflow for a row that is masked with finfo.min, and 0 · inf would be NaN.
    if not options.z_loss:
        return losses
    squares = options.z_loss * wide.logsumexp(-1).square()
    return losses + squares.where(target != options.ignore_index, 0.0)


def reference_statistics(
    z: Tensor, target: Tensor, options: Options, columns: Columns, weight: Tensor | None, predict: bool,
    want_mean: bool = False,
) -> Statistics:  # fmt: skip
    """`Statistics` of logits z [N, V], V the number of `columns`."""
    counted, has_target, column = _targets(target, options, columns, z.shape[1])
    smoothing, wide = options.label_smoothing, _shaped(z, options)
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
    # On a CPU, log_softmax is more accurate than logsumexp; it is NaN if all logits are -inf.
    log_sum = below.log_softmax(1).gather(1, prediction).neg().where(largest != -torch.inf, -torch.inf)
    return Statistics(
        largest=rows(largest.clamp_min(LOWEST)),
        log_sum=rows(log_sum),
        linear=rows(linear),
        lse_weight=lse_weight,
        prediction=(prediction + columns.start).where(counted, -1)[:, 0] if predict else None,
        mean=rows(_mean(below)) if want_mean else None,
    )


def _mean(below: Tensor) -> Tensor:
    """Σ p (z - m) [N, 1] from z - m [N, V]; 0 for a row of -inf."""
    return (below.softmax(1).nan_to_num(nan=0.0) * below.clamp_min(LOWEST)).sum(1, keepdim=True)


def reference_gradient(
    z: Tensor, target: Tensor, scale: Tensor, whole: Statistics, options: Options, columns: Columns,
    weight: Tensor | None, entropy_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """scale · dloss/dz + entropy_scale · dentropy/dz [N, V] for logits z of `columns`."""
    counted, has_target, column = _targets(target, options, columns, z.shape[1])
    smoothing, wide = options.label_smoothing, _shaped(z, options)
    largest, log_sum = whole.largest[:, None], whole.log_sum[:, None]
    lse_weight = 1.0 if whole.lse_weight is None else whole.lse_weight[:, None]
    factor = lse_weight + 2 * options.z_loss * (largest + log_sum)
    dz = (wide - largest).sub_(log_sum).exp_().mul_(factor)
    one_hot = torch.full_like(largest, smoothing - 1) * (1.0 if weight is None else weight[column])
    dz.scatter_add_(1, column, one_hot.where(has_target, 0))
    if smoothing:
        dz.sub_(smoothing / columns.total * (1.0 if weight is None else weight))
    dz.mul_(scale[:, None])
    if entropy_scale is not None:
        assert whole.mean is not None
        below = (wide - largest).clamp_min_(LOWEST)
        dz.add_((below - log_sum).exp_().mul_(whole.mean[:, None] - below).mul_(entropy_scale[:, None]))
    if options.softcap:
        dz.mul_(1 - (wide * (options.temperature / options.softcap)).square_())
    if options.temperature != 1:
        dz.div_(options.temperature)
    return dz.where(counted, 0)


def _shaped(z: Tensor, options: Options) -> Tensor:
    """Logits with softcap and temperature applied, in the dtype of the losses."""
    wide = z.to(accumulator(z.dtype))
    wide = options.softcap * torch.tanh(wide / options.softcap) if options.softcap else wide
    return wide if options.temperature == 1 else wide / options.temperature


def _targets(target: Tensor, options: Options, columns: Columns, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(target is not ignored, target is in `columns`, its column relative to `columns.start` or 0), each [N, 1]."""
    counted = (target != options.ignore_index)[:, None]
    column = target[:, None] - columns.start
    if bool((counted & ((target < 0) | (target >= columns.total))[:, None]).any()):
        raise IndexError(f"target is out of bounds for {columns.total} classes")
    has_target = counted & (column >= 0) & (column < width)
    return counted, has_target, column.where(has_target, 0)
