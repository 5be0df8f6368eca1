"""Host functions for losses of rows of logits and their gradients, for `cross_entropy` and `linear_cross_entropy`.

Four functions compute losses or gradients from logits of all columns, or of a shard of the vocabulary. Each launches
`row_kernel`, or calls `row_reference` in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .._launch import accumulator, launch, multiprocessors, takes_kernel
from .row_kernel import cross_entropy_kernel
from .row_reference import reference_gradient, reference_statistics
from .row_statistics import Columns, Options, Statistics, losses_of

# Row stride of a padded buffer is a multiple of this, for 16-byte accesses by matrix products and the kernel.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Tile:
    """Launch-table entry for logits of up to `itemsize` bytes.

    Attributes:
        block: logits of a part of a row, computed by one program.
        warps: warps per program.
        registers: maximum registers per thread.
        distance_per_sm: programs per multiprocessor between the statistics of a part and its gradient. More than are
            resident, so that no program waits long; few enough that the logits in between stay in L2.
    """

    itemsize: int
    block: int
    warps: int
    registers: int
    distance_per_sm: int


_TILES = (
    Tile(itemsize=2, block=4096, warps=4, registers=64, distance_per_sm=11),
    Tile(itemsize=4, block=2048, warps=4, registers=64, distance_per_sm=11),
)


def _tile(vocabulary: int, itemsize: int) -> tuple[Tile, int, int]:
    """(launch-table entry, logits per part, warps per program) for rows of `vocabulary` logits."""
    tile = next(tile for tile in _TILES if itemsize <= tile.itemsize)
    block = min(max(triton.next_power_of_2(vocabulary), 128), tile.block)
    return tile, block, max(tile.warps * block // tile.block, 1)


def cross_entropy_rows(
    z: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, options: Options, gradient: bool,
    *, weight: Tensor | None = None, dz: Tensor | None = None, largest: Tensor | None = None,
    log_sum: Tensor | None = None, lse_weight: Tensor | None = None, prediction: Tensor | None = None,
    mean: Tensor | None = None, padding: bool = True,
) -> None:  # fmt: skip
    """Fill `loss` with the losses of rows over all columns and, if `gradient`, `dz` with scale · dloss/dz.

    Args:
        z: [N, V], or [A, B, V] with N = A · B; column stride 1; bf16 | fp16 | fp32 (fp64 in plain PyTorch).
        target: [N], int64, contiguous.
        scale: [N], loss's dtype, may be an expanded scalar; only for the gradient.
        loss: [N], fp32 (fp64 for fp64).
        options: options of the loss.
        gradient: whether to compute dz.
        weight: [V], loss's dtype, contiguous: class weights.
        dz: shape and dtype of z; None: overwrite z.
        largest, log_sum, lse_weight: [N], loss's dtype, filled with statistics for `cross_entropy_gradient`;
            lse_weight only with class weights.
        prediction: [N], int64, filled with the first column of each row's maximum logit; -1 for ignored rows.
        mean: [N], loss's dtype, filled with `Statistics.mean`.
        padding: whether z is the first V columns of a buffer with `padded_width(V)` columns. The kernel may load the
            padding, and may overwrite it if it overwrites z.
    """
    whole = Columns(0, z.shape[-1])
    if takes_kernel(z):
        results = _Results(loss, largest, log_sum, lse_weight, prediction, mean)
        filled = None if not gradient else z if dz is None else dz
        _launch_rows(z, target, options, whole, weight, results, scale, filled, padding)
        return
    flat = z.reshape(-1, z.shape[-1])
    found = reference_statistics(flat, target, options, whole, weight, prediction is not None, mean is not None)
    loss.copy_(losses_of(found, target, options))
    wanted = (largest, log_sum, None, lse_weight, prediction, mean)
    for given, value in zip(wanted, found, strict=True):
        if given is not None and value is not None:
            given.copy_(value)
    if gradient:
        cross_entropy_gradient(
            z, target, scale, found.largest, found.log_sum, found.lse_weight, options, weight=weight, dz=dz
        )


def cross_entropy_gradient(
    z: Tensor, target: Tensor, scale: Tensor | None, largest: Tensor, log_sum: Tensor, lse_weight: Tensor | None,
    options: Options,
    *, weight: Tensor | None = None, dz: Tensor | None = None, columns: Columns | None = None,
    mean: Tensor | None = None, entropy_scale: Tensor | None = None, padding: bool = True,
) -> None:  # fmt: skip
    """Fill `dz` with scale · dloss/dz from the statistics of the rows; arguments as in `cross_entropy_rows`.

    With `columns`, z and weight hold only these columns; the statistics are those of the whole vocabulary. With
    `entropy_scale` [N], loss's dtype, entropy_scale · dentropy/dz is added, which requires `mean`.
    """
    assert scale is not None
    columns = columns or Columns(0, z.shape[-1])
    if takes_kernel(z):
        results = _Results(None, largest, log_sum, lse_weight, None, None if entropy_scale is None else mean)
        _launch_rows(
            z, target, options, columns, weight, results, scale, z if dz is None else dz, padding, entropy_scale
        )
        return
    flat = z.reshape(-1, z.shape[-1])
    whole = Statistics(largest, log_sum, largest, lse_weight, None, mean)
    value = reference_gradient(flat, target, scale, whole, options, columns, weight, entropy_scale)
    (z if dz is None else dz).copy_(value.view(z.shape))


def partial_statistics(
    z: Tensor, target: Tensor, options: Options, columns: Columns,
    *, weight: Tensor | None = None, predict: bool = False, mean: bool = False,
) -> Statistics:  # fmt: skip
    """Statistics of the rows over `columns` of the vocabulary; does not write to z.

    Arguments as in `cross_entropy_rows`, z and weight of these columns; target indexes the whole vocabulary.
    """
    if not takes_kernel(z):
        return reference_statistics(z, target, options, columns, weight, predict, mean)
    largest, log_sum, linear, lse_weight = (z.new_empty(z.shape[0], dtype=accumulator(z.dtype)) for _ in range(4))
    best, middle = torch.empty_like(target) if predict else None, torch.empty_like(largest) if mean else None
    found = Statistics(largest, log_sum, linear, lse_weight, best, middle)
    results = _Results(linear, largest, log_sum, lse_weight, best, middle)
    _launch_rows(z, target, options, columns, weight, results, None, None, padding=True)
    return found


def partial_gradient(
    z: Tensor, target: Tensor, scale: Tensor, whole: Statistics, options: Options, columns: Columns,
    *, weight: Tensor | None = None, entropy_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Overwrite the logits z of `columns` with scale · dloss/dz; `whole`: statistics of the whole vocabulary."""
    cross_entropy_gradient(
        z, target, scale, whole.largest, whole.log_sum, whole.lse_weight, options, weight=weight, columns=columns,
        mean=whole.mean, entropy_scale=entropy_scale,
    )  # fmt: skip


class _Results(NamedTuple):
    """Output tensors of the kernel, each [N]. If `loss` is None, the statistics among them are inputs."""

    loss: Tensor | None = None
    largest: Tensor | None = None
    log_sum: Tensor | None = None
    lse_weight: Tensor | None = None
    prediction: Tensor | None = None
    mean: Tensor | None = None


def _launch_rows(
    z: Tensor, target: Tensor, options: Options, columns: Columns, weight: Tensor | None, results: _Results,
    scale: Tensor | None, dz: Tensor | None, padding: bool, entropy_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel: fill `results` if it has a loss, and dz unless it is None."""
    vocabulary = z.shape[-1]
    tile, block, warps = _tile(vocabulary, z.itemsize)
    group = 1 if padding else _group_size(z, dz)
    parts = triton.cdiv(vocabulary + group - 1, block)
    n_parts = target.shape[0] * parts
    words, weight_sum, distance = None, None, 0
    statistics = results.loss is not None
    if statistics:
        # Number of words that `_publish_statistics` stores.
        words_per_part = 3 if results.prediction is not None else 2 if options.label_smoothing else 1
        words_per_part = words_per_part if results.mean is None else 4
        if (words_per_part + 1) * n_parts >= 2**31:
            raise ValueError(f"{target.shape[0]} rows of logits are too many for a 32-bit index: split them")
        words = z.new_zeros(words_per_part * n_parts, dtype=torch.int64)
        weight_sum = weight.sum() if weight is not None and options.label_smoothing else None
        distance = min(n_parts, parts + tile.distance_per_sm * multiprocessors(z.device))
    launch(
        cross_entropy_kernel, (n_parts + distance,),
        z, dz, target, weight, weight_sum, scale, entropy_scale,
        *results, words,
        n_parts, distance, z.shape[-2], *_row_strides(z), *((0, 0) if dz is None else _row_strides(dz)),
        0 if scale is None else scale.stride(0), options.ignore_index, columns.start,
        V=vocabulary, WIDTH=padded_width(vocabulary) if padding else vocabulary, TOTAL=columns.total,
        SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
        TEMPERATURE=options.temperature, STATISTICS=statistics, GRADIENT=dz is not None,
        PARTS=parts, PADDED=triton.next_power_of_2(parts), BLOCK=block, GROUP=group,
        num_warps=warps, maxnreg=tile.registers,
    )  # fmt: skip


def _group_size(z: Tensor, dz: Tensor | None) -> int:
    """Logits per 16 bytes if rows are not 16-byte aligned and z and dz have equal misalignment; else 1."""
    group = 16 // z.itemsize
    strides = (*_row_strides(z), z.shape[-1])
    if all(stride % group == 0 for stride in strides) or z.data_ptr() % 16:
        return 1
    if dz is None:
        return group
    alike = all((a - b) % group == 0 for a, b in zip(_row_strides(z), _row_strides(dz), strict=True))
    return group if alike and dz.data_ptr() % 16 == 0 else 1


def _row_strides(x: Tensor) -> tuple[int, int]:
    """(outer row stride, inner row stride); the outer is 0 for x [N, V]."""
    return 0 if x.dim() == 2 else x.stride(0), x.stride(-2)


def rows_of(x: Tensor) -> Tensor:
    """x [..., V] as [A, B, V] with column stride 1; a view of x where its strides allow it, else a copy."""
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


def padded_width(vocabulary: int) -> int:
    """Row stride of a padded buffer for `vocabulary` columns of logits."""
    return -(-vocabulary // _ALIGNMENT) * _ALIGNMENT
