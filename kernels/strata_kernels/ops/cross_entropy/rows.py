"""Losses of rows of logits and their gradients: what `cross_entropy` and `linear_cross_entropy` are made of.

The kernel, or plain PyTorch where it does not run; whole rows, or the columns that one process holds of them. The
formulas stand in `cross_entropy`, how the work is cut in `kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .._launch import accumulator, launch, multiprocessors, takes_kernel
from .kernels import cross_entropy_kernel
from .reference import reference_gradient, reference_statistics
from .statistics import Options, Shard, Statistics, shard_loss

# Rows of a padded buffer start at multiples of this many elements: the matrix products and the kernel move 16 bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Tile:
    """How rows of `itemsize` bytes per logit are cut.

    block: logits of a part; warps: of a program; registers: of a thread at the most; ahead: programs per multiprocessor
    by which the statistics are ahead of the gradients, more than run at once, so that none waits, and as few as that
    allows, so that the logits between are in L2.
    """

    itemsize: int
    block: int
    warps: int
    registers: int
    ahead: int


_TILES = (
    Tile(itemsize=2, block=4096, warps=4, registers=64, ahead=11),
    Tile(itemsize=4, block=2048, warps=4, registers=64, ahead=11),
)


def _tile(vocabulary: int, itemsize: int) -> tuple[Tile, int, int]:
    """The table's row, and the logits of a part and the warps of a program for rows of `vocabulary` logits."""
    tile = next(tile for tile in _TILES if itemsize <= tile.itemsize)
    block = min(max(triton.next_power_of_2(vocabulary), 128), tile.block)
    return tile, block, max(tile.warps * block // tile.block, 1)


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
        results = _Results(loss, largest, log_sum, share, prediction)
        filled = None if not gradient else z if dz is None else dz
        _launch_rows(z, target, options, whole, weight, results, scale, filled, padding)
        return
    flat = z.reshape(-1, z.shape[-1])
    found = reference_statistics(flat, target, options, whole, weight, prediction is not None)
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
        results = _Results(None, largest, log_sum, share)
        _launch_rows(z, target, options, shard, weight, results, scale, z if dz is None else dz, padding)
        return
    flat = z.reshape(-1, z.shape[-1])
    value = reference_gradient(flat, target, scale, largest, log_sum, share, options, shard, weight)
    (z if dz is None else dz).copy_(value.view(z.shape))


def shard_statistics(
    z: Tensor, target: Tensor, options: Options, shard: Shard, *, weight: Tensor | None = None, predict: bool = False
) -> Statistics:
    """What a shard's logits z [N, V of the shard] add to the losses; z is only read.

    Arguments as in `cross_entropy_rows`: target counts in the whole vocabulary, weight is of the shard's classes.
    """
    if not takes_kernel(z):
        return reference_statistics(z, target, options, shard, weight, predict)
    largest, log_sum, linear, share = (z.new_empty(z.shape[0], dtype=accumulator(z.dtype)) for _ in range(4))
    found = Statistics(largest, log_sum, linear, share, torch.empty_like(target) if predict else None)
    results = _Results(linear, largest, log_sum, share, found.prediction)
    _launch_rows(z, target, options, shard, weight, results, None, None, padding=True)
    return found


def shard_gradient(
    z: Tensor, target: Tensor, scale: Tensor, whole: Statistics, options: Options, shard: Shard,
    *, weight: Tensor | None = None,
) -> None:  # fmt: skip
    """Overwrite a shard's logits z by scale · dloss/dz, from statistics of the whole vocabulary."""
    cross_entropy_gradient(
        z, target, scale, whole.largest, whole.log_sum, whole.share, options, weight=weight, shard=shard
    )


class _Results(NamedTuple):
    """Where the kernel stores what it finds for each row, [N]; without a place for the loss it reads the next three."""

    loss: Tensor | None = None
    largest: Tensor | None = None
    log_sum: Tensor | None = None
    share: Tensor | None = None
    prediction: Tensor | None = None


def _launch_rows(
    z: Tensor, target: Tensor, options: Options, shard: Shard, weight: Tensor | None, results: _Results,
    scale: Tensor | None, dz: Tensor | None, padding: bool,
) -> None:  # fmt: skip
    """Fill the results, if they have a place for the loss, and dz, if there is one."""
    vocabulary = z.shape[-1]
    tile, block, warps = _tile(vocabulary, z.itemsize)
    group = 1 if padding else _group(z, dz)
    parts = triton.cdiv(vocabulary + group - 1, block)
    n_parts = target.shape[0] * parts
    words, weight_sum, lag = None, None, 0
    statistics = results.loss is not None
    if statistics:
        # A word per part for its maximum and sum, one for its weighted sum, one for its largest logit's column.
        kinds = 3 if results.prediction is not None else 2 if options.label_smoothing else 1
        if (kinds + 1) * n_parts >= 2**31:
            raise ValueError(f"{target.shape[0]} rows of logits are too many for an index in 32 bits: split them")
        words = z.new_zeros(kinds * n_parts, dtype=torch.int64)
        weight_sum = weight.sum() if weight is not None and options.label_smoothing else None
        lag = min(n_parts, parts + tile.ahead * multiprocessors(z.device))
    launch(
        cross_entropy_kernel, (n_parts + lag,),
        z, dz, target, weight, weight_sum, scale,
        *results, words,
        n_parts, lag, z.shape[-2], *_row_strides(z), *((0, 0) if dz is None else _row_strides(dz)),
        0 if scale is None else scale.stride(0), options.ignore_index, shard.start,
        V=vocabulary, WIDTH=padded(vocabulary) if padding else vocabulary, TOTAL=shard.total,
        SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
        STATISTICS=statistics, GRADIENT=dz is not None,
        PARTS=parts, PADDED=triton.next_power_of_2(parts), BLOCK=block, GROUP=group,
        num_warps=warps, maxnreg=tile.registers,
    )  # fmt: skip


def _group(z: Tensor, dz: Tensor | None) -> int:
    """How many logits 16 bytes are, if rows are not made of whole ones but those of z and dz alike; else 1."""
    group = 16 // z.itemsize
    strides = (*_row_strides(z), z.shape[-1])
    if all(stride % group == 0 for stride in strides) or z.data_ptr() % 16:
        return 1
    if dz is None:
        return group
    alike = all((a - b) % group == 0 for a, b in zip(_row_strides(z), _row_strides(dz), strict=True))
    return group if alike and dz.data_ptr() % 16 == 0 else 1


def _row_strides(x: Tensor) -> tuple[int, int]:
    return 0 if x.dim() == 2 else x.stride(0), x.stride(-2)


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


def padded(vocabulary: int) -> int:
    """Elements from one row of a buffer of logits to the next."""
    return -(-vocabulary // _ALIGNMENT) * _ALIGNMENT
