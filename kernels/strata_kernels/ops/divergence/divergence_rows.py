"""Host functions for divergences of rows of logits and their gradients: kernel or reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .._launch import launch, multiprocessors, takes_kernel
from ..cross_entropy.row_reference import reference_gradient as label_gradient
from ..cross_entropy.row_statistics import Columns, Options, Statistics
from .cluster_kernel import cluster_divergence, cluster_of
from .divergence_kernel import FORWARD_KL, JSD, REVERSE_KL, TVD, divergence_kernel
from .divergence_reference import (
    COSINE_EPS,
    Form,
    reference_divergence,
    reference_gradient,
)
from .narrow_kernel import narrow_divergence_kernel
from .whole_row_kernels import cosine_kernel, tvd_probabilities_kernel

_KINDS = {"forward_kl": FORWARD_KL, "reverse_kl": REVERSE_KL, "jsd": JSD, "tvd": TVD}
# Distances without a softmax: kernels and their constants; block size of their loop over a row.
_WHOLE_ROW: dict[str, tuple[Any, dict[str, float]]] = {
    "cosine": (cosine_kernel, {"EPS": COSINE_EPS}),
    "tvd_probabilities": (tvd_probabilities_kernel, {}),
}
_WHOLE_ROW_BLOCK, _WHOLE_ROW_WARPS = 4096, 8
# Most parts of a row for KEEP. Rows of more parts, or more than can be resident, are read several times.
_MOST_KEPT = 32
# Registers per multiprocessor, for all GPU generations that Triton supports.
_REGISTERS = 2**16


@dataclass(frozen=True)
class Tile:
    """Launch-table entry for logits of up to `itemsize` bytes.

    Attributes:
        block: logits of a part of a row, computed by one program.
        warps: warps per program.
        registers: maximum registers per thread.
        distance_per_sm: without KEEP, programs per multiprocessor between two phases of a part: more than are
            resident, so that none waits long.
    """

    itemsize: int
    block: int
    warps: int
    registers: int
    distance_per_sm: int


_TILES = (
    # 32 logits of each tensor per thread: with fewer, the work per program on row reductions dominates.
    Tile(itemsize=2, block=4096, warps=4, registers=128, distance_per_sm=4),
    Tile(itemsize=4, block=4096, warps=8, registers=80, distance_per_sm=4),
)


@dataclass(frozen=True)
class NarrowTile:
    """Launch parameters of `narrow_divergence_kernel`.

    Attributes:
        block, warps, registers: as in `Tile`.
    """

    block: int
    warps: int
    registers: int


_NARROW_TILE = NarrowTile(block=4096, warps=4, registers=128)
# Most parts of a row of the narrow kernel; a GPU with 16 multiprocessors can hold them.
_MOST_NARROW = 64


class Labels(NamedTuple):
    """Cross entropies of the targets, whose gradients are added to dz.

    scale: [N], dtype of the losses, may be an expanded scalar.
    largest, log_sum: [N], statistics of the rows at temperature 1, with the form's softcap.
    classes: number of classes that targets index.
    """

    scale: Tensor
    largest: Tensor
    log_sum: Tensor
    classes: int


def divergence_rows(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, form: Form, dz: Tensor | None = None,
    labels: Labels | None = None,
) -> None:  # fmt: skip
    """Fill `loss` with the divergences of rows, and dz (which may be z) with scale · dloss/dz.

    Args:
        z: [N, V], logits of the student; column stride 1; bf16 | fp16 | fp32 (fp64 in plain PyTorch).
        t: [N, V], logits of the teacher, any of these dtypes.
        target: [N], int64, contiguous; only compared with `form.ignore_index`.
        scale: [N], loss's dtype, may be an expanded scalar; required for dz.
        loss: [N], fp32 (fp64 for fp64).
        form: options of the divergence.
        dz: [N, V], z's dtype, column stride 1; None for no gradient.
        labels: cross entropies whose gradients are added to dz; targets may be >= V.
    """
    # The cross entropy needs logits and a softmax.
    assert labels is None or not (form.normalized or form.divergence in _WHOLE_ROW)
    if takes_kernel(z) and form.divergence in _WHOLE_ROW:
        kernel, constants = _WHOLE_ROW[form.divergence]
        launch(
            kernel, (z.shape[0],),
            z, t, dz, target, scale, loss, z.stride(0), t.stride(0), 0 if dz is None else dz.stride(0),
            0 if scale is None else scale.stride(0), form.ignore_index,
            V=z.shape[1], **constants, BLOCK=min(triton.next_power_of_2(z.shape[1]), _WHOLE_ROW_BLOCK),
            num_warps=_WHOLE_ROW_WARPS,
        )  # fmt: skip
        return
    if takes_kernel(z):
        _launch(z, t, target, scale, loss, form, dz, labels)
        return
    loss.copy_(reference_divergence(z, t, target, form))
    if dz is not None:
        assert scale is not None
        value = reference_gradient(z, t, target, scale, form)
        if labels is not None:
            rows = Statistics(labels.largest, labels.log_sum, labels.largest, None, None)
            options, columns = Options(form.ignore_index, 0.0, 0.0, form.softcap), Columns(0, labels.classes)
            value += label_gradient(z, target, labels.scale, rows, options, columns, None)
        dz.copy_(value)


def _launch(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, form: Form, dz: Tensor | None,
    labels: Labels | None,
) -> None:  # fmt: skip
    cluster = None if labels is not None else _cluster(z, t, form, dz)
    if cluster is not None:
        _launch_clusters(z, t, target, scale, loss, form, dz, cluster)
        # A plan of launches is for all GPUs.
        if not z.is_meta:
            return
    if labels is None and _is_narrow(z, t, form, dz):
        _launch_narrow(z, t, target, scale, loss, form, dz)
        return
    n_rows, vocabulary = z.shape
    tile = next(tile for tile in _TILES if max(z.itemsize, t.itemsize) <= tile.itemsize)
    block, parts, n_parts = _parts(z, tile, smallest=128)
    keep = form.normalized or parts == 1 or parts <= _most_parts(z, tile, _MOST_KEPT)
    distance = 0 if keep else min(n_parts, parts + tile.distance_per_sm * multiprocessors(z.device))
    narrow = max(z.itemsize, t.itemsize) == 2
    partial = loss.new_empty(n_rows, parts)
    words = None if form.normalized else z.new_zeros(3 * n_parts, dtype=torch.int64)
    launch(
        divergence_kernel, (n_parts + (1 + (dz is not None)) * distance,),
        z, t, dz, target, scale, *((None, None, None) if labels is None else labels[:3]), partial, words,
        n_parts, distance, z.stride(0), t.stride(0), 0 if dz is None else dz.stride(0),
        0 if scale is None else scale.stride(0), 0 if labels is None else labels.scale.stride(0), form.ignore_index,
        V=vocabulary, KIND=_KINDS[form.divergence], BETA=form.beta,
        SOFTCAP=form.softcap, TEACHER_SOFTCAP=form.teacher_softcap, TEMPERATURE=form.temperature,
        NORMALIZED=form.normalized, GRADIENT=dz is not None, KEEP=keep,
        # Approximations are below the rounding error of 16-bit logits; NARROW, which affects the normalization of a
        # row, only for jsd. The interpreter has no assembly.
        NARROW=narrow and form.divergence == "jsd", FAST=narrow and z.device.type != "cpu",
        PARTS=parts, PADDED=triton.next_power_of_2(parts), BLOCK=block,
        num_warps=max(tile.warps * block // tile.block, 1), maxnreg=tile.registers,
    )  # fmt: skip
    torch.sum(partial, 1, out=loss)


def _cluster(z: Tensor, t: Tensor, form: Form, dz: Tensor | None) -> int | None:
    """Thread blocks per row for `cluster_divergence`; None if it does not support these rows or this GPU."""
    if form.divergence != "jsd" or form.normalized or form.softcap or form.teacher_softcap or dz is None:
        return None
    # It loads and stores 16 bytes at a time.
    if any(
        x.dtype != torch.bfloat16 or x.data_ptr() % 16 or any(n % 8 for n in (x.shape[1], x.stride(0)))
        for x in (z, t, dz)
    ):
        return None
    cluster = cluster_of(z.shape[1])
    if cluster is None or z.is_meta:
        return cluster
    return cluster if z.is_cuda and cluster_divergence.resident_clusters(z.device, CLUSTER=cluster) else None


def _is_narrow(z: Tensor, t: Tensor, form: Form, dz: Tensor | None) -> bool:
    """Whether `narrow_divergence_kernel` supports these rows: aligned pairs of 16-bit logits, no softcap, no tvd."""
    given = [x for x in (z, t, dz) if x is not None]
    # tvd's gradient is the sign of p - q, which would be wrong more often than PyTorch's.
    if (
        form.divergence == "tvd"
        or form.normalized
        or form.softcap
        or form.teacher_softcap
        or any(x.dtype != z.dtype for x in given)
    ):
        return False
    if z.itemsize != 2 or any(n % 2 for x in given for n in (x.shape[1], x.stride(0), x.storage_offset())):
        return False
    return z.shape[1] <= _most_parts(z, _NARROW_TILE, _MOST_NARROW) * _NARROW_TILE.block


def _parts(z: Tensor, tile: Tile | NarrowTile, smallest: int) -> tuple[int, int, int]:
    """(logits per part, parts per row, parts of all rows). Raises ValueError for too many parts."""
    block = min(max(triton.next_power_of_2(z.shape[1]), smallest), tile.block)
    parts = triton.cdiv(z.shape[1], block)
    n_parts = z.shape[0] * parts
    if 3 * n_parts >= 2**31:
        raise ValueError(f"{z.shape[0]} rows of logits are too many for a 32-bit index: split them")
    return block, parts, n_parts


def _most_parts(z: Tensor, tile: Tile | NarrowTile, most: int) -> int:
    """Most parts of a row whose programs may wait for each other, which must all be resident; at most `most`.

    A GPU partition (MIG, MPS) has fewer multiprocessors. Recorded launches assume a full GPU.
    """
    if z.device.type == "cpu":
        return 1  # The interpreter runs programs sequentially.
    if z.device.type == "meta":
        return most
    return min(most, _programs_at_once(tile, z))


def _programs_at_once(tile: Tile | NarrowTile, z: Tensor) -> int:
    """Number of programs that are resident at once on the GPU of z."""
    return _REGISTERS // (32 * tile.warps * tile.registers) * multiprocessors(z.device)


def _launch_clusters(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, form: Form, dz: Tensor | None,
    cluster: int,
) -> None:  # fmt: skip
    assert dz is not None and scale is not None
    launch(
        cluster_divergence, (z.shape[0],),
        z, t, dz, target, scale, loss, *z.shape, *(x.stride(0) * x.itemsize for x in (z, t, dz)), scale.stride(0),
        form.ignore_index, form.beta, math.log2(math.e) / form.temperature,
        CLUSTER=cluster,
    )  # fmt: skip


def _launch_narrow(
    z: Tensor, t: Tensor, target: Tensor, scale: Tensor | None, loss: Tensor, form: Form, dz: Tensor | None
) -> None:
    (n_rows, vocabulary), tile = z.shape, _NARROW_TILE
    block, parts, n_parts = _parts(z, tile, smallest=256)
    n_groups = min(n_rows, max(_programs_at_once(tile, z) // parts, 1))
    partial = loss.new_empty(n_rows, parts)
    words = [None if x is None else x.view(torch.int32) for x in (z, t, dz)]
    launch(
        narrow_divergence_kernel, (n_groups * parts,),
        *words, target, scale, partial, z.new_zeros(3 * n_parts, dtype=torch.int64),
        n_rows, n_groups, n_parts, *(0 if x is None else x.stride(0) for x in words),
        0 if scale is None else scale.stride(0), form.ignore_index,
        V=vocabulary // 2, KIND=_KINDS[form.divergence], BETA=form.beta, TEMPERATURE=form.temperature,
        GRADIENT=dz is not None, BF16=z.dtype == torch.bfloat16,
        # The interpreter has no assembly.
        FAST=z.device.type != "cpu",
        PARTS=parts, PADDED=triton.next_power_of_2(parts), BLOCK=block // 2,
        num_warps=max(tile.warps * block // tile.block, 1), maxnreg=tile.registers,
    )  # fmt: skip
    torch.sum(partial, 1, out=loss)
