"""Launch tables of the norms, and the host functions that launch the kernels or call the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from .._launch import dense, launch, multiprocessors, takes_kernel
from .norm_kernels import add_rows_kernel, norm_bwd_kernel, norm_fwd_kernel
from .norm_reference import (
    COUNTERS,
    norm_backward_reference,
    norm_reference,
    normalized_like,
    statistics_like,
    unfilled,
)


@dataclass(frozen=True)
class Tile:
    """Launch-table entry for rows of up to `row` bytes.

    row: bytes of the widest row.
    warps: warps per program.
    tile: bytes of a tile of several narrow rows; 0 for one row per tile.
    block: maximum bytes of a block; a narrower row, padded to a power of two, is one block.
    keep: whether a row stays in registers between its reduction and its use, or is loaded again.
    stages: pipeline stages of the backward kernel's loop over tiles.
    occupancy: programs per multiprocessor of the backward kernel.
    groups: groups of programs that add dw and db inside the backward kernel; 0: a second kernel adds them.
    """

    row: int
    warps: int
    tile: int = 0
    block: int = 2**40
    keep: bool = True
    stages: int = 1
    occupancy: int = 1
    groups: int = 0


_FORWARD = (
    Tile(row=2**12, tile=2**12, warps=4),
    Tile(row=2**13, block=2**12, warps=4),
    Tile(row=2**14, block=2**12, warps=8),
    Tile(row=40960, block=2**13, warps=16),
    Tile(row=2**16, block=2**14, warps=32, keep=False),
    Tile(row=2**17, block=2**14, warps=16),
    Tile(row=2**40, block=2**14, warps=32, keep=False),
)
# About 60 KiB of loads in flight per multiprocessor are fastest: fewer do not hide memory latency, more contend.
# `groups` only for narrow rows: with wide ones, the last program would add for longer than a second launch takes.
_BACKWARD = (
    Tile(row=2**9, tile=2**13, warps=8, stages=5, groups=15),
    Tile(row=2**12, tile=2**12, warps=4, stages=4, occupancy=2),
    Tile(row=6144, block=2**10, warps=4, stages=4, occupancy=2),
    Tile(row=2**13, tile=2**14, warps=8, stages=3),
    Tile(row=10240, block=2**12, warps=8, stages=4),
    Tile(row=2**14, block=2**12, warps=8, stages=3),
    Tile(row=2**15, block=2**14, warps=32, keep=False),
    Tile(row=2**40, block=2**13, warps=16, keep=False),
)
# Without `keep`: elements of dw and db that one program accumulates in registers.
_OWN_SUMS = 20480
# Up to this many bytes of input, the kernel is faster than a second launch.
_BRIEF = 2**23


def _cut(table: tuple[Tile, ...], width: int, itemsize: int, interpreted: bool) -> tuple[Tile, dict[str, Any]]:
    """(launch-table entry for rows of `width` features, constexprs derived from it)."""
    tile = next(tile for tile in table if width * itemsize <= tile.row)
    padded = triton.next_power_of_2(width)
    block = min(padded, tile.block // itemsize)
    return tile, {
        "D": width,
        "ROWS": max(1, tile.tile // (padded * itemsize)),
        "BLOCK": block,
        "CHUNKS": triton.cdiv(width, block),
        "KEEP": tile.keep,
        # Not for narrow rows, where a thread may hold one element, nor in the interpreter, which has no assembly.
        "REPACK": padded > 256 and not interpreted,
        "num_warps": tile.warps,
    }


@cache
def _forward_plan(width: int, itemsize: int, cast: str, center: bool, interpreted: bool) -> dict[str, Any]:
    """The constexprs of the forward kernel."""
    _, cut = _cut(_FORWARD, width, itemsize, interpreted)
    return {**cut, "CAST": cast, "CENTER": center, "COUNTERS": COUNTERS}


@cache
def _backward_plan(
    width: int, itemsize: int, gradients: int, center: bool, interpreted: bool
) -> tuple[Tile, dict[str, Any]]:
    """(launch-table entry, constexprs of the backward kernel); gradients: how many of dw and db are computed."""
    tile, cut = _cut(_BACKWARD, width, itemsize, interpreted)
    split = 1 if tile.keep else max(1, triton.cdiv(width * gradients, _OWN_SUMS))
    chunks = triton.cdiv(cut["CHUNKS"], split) * split
    added = {"GROUPS": tile.groups, "ADD_ROWS": 16, "ADD_BLOCK": 256}
    return tile, {**cut, "CHUNKS": chunks, "SPLIT": split, "STAGES": tile.stages, "CENTER": center, **added}


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """(x as rows with stride 1 along features, the row stride); a view of x where its strides allow it, else a copy."""
    if not x.is_contiguous():
        x = x.reshape(-1, x.shape[-1])
        if x.stride(1) == 1:
            return x, x.stride(0)
        x = x.contiguous()
    return x, x.shape[-1]


def _rows_if_any(x: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if x is None else _rows(x)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, cast: str, center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, h (x itself without a residual) and the statistics of `statistics_like`."""
    if not takes_kernel(x):
        return norm_reference(x, residual, weight, bias, eps, offset, cast, center)
    y, stats = normalized_like(x, weight, cast), statistics_like(x, center)
    h = None if residual is None else unfilled(x)
    rows, stride = _rows(x)
    residual_rows, residual_stride = _rows_if_any(residual)
    width = x.shape[-1]
    n_rows = x.numel() // width
    plan = _forward_plan(width, x.itemsize, cast, center, x.is_cpu)
    # The kernels compute 32-bit row indices, up to one tile beyond the last row.
    if n_rows + plan["ROWS"] >= 2**31:
        raise ValueError(f"x has {n_rows} rows, too many for a 32-bit index: split it")
    launch(
        norm_fwd_kernel, (-(-n_rows // plan["ROWS"]),),
        rows, residual_rows, dense(weight), dense(bias), y, h, stats, n_rows, stride, residual_stride, eps, offset,
        **plan,
    )  # fmt: skip
    return y, x if h is None else h, stats


def norm_backward(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float, center: bool,
    dw: Tensor | None, db: Tensor | None,
) -> Tensor:  # fmt: skip
    """dx; also fills dw and db unless they are None. `x` is h of the forward pass."""
    if x.numel() == 0:
        for gradient in (dw, db):
            if gradient is not None:
                gradient.zero_()
        return unfilled(x)
    run = _backward_triton if takes_kernel(x) else norm_backward_reference
    return run(dy, dh, x, weight, stats, offset, center, dw, db)


def _backward_triton(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float, center: bool,
    dw: Tensor | None, db: Tensor | None,
) -> Tensor:  # fmt: skip
    dx = unfilled(x)
    rows, stride = _rows(x)
    dy_rows, dy_stride = _rows(dy)
    dh_rows, dh_stride = _rows_if_any(dh)
    width = x.shape[-1]
    n_rows = x.numel() // width
    gradients = (dw is not None) + (db is not None)
    tile, plan = _backward_plan(width, x.itemsize, gradients, center, x.is_cpu)
    programs = min(-(-n_rows // plan["ROWS"]), tile.occupancy * multiprocessors(x.device))
    fused = tile.groups > 0 and x.nbytes <= _BRIEF
    partial = x.new_empty((programs, width * gradients), dtype=torch.float32)
    launch(
        norm_bwd_kernel, (programs * plan["SPLIT"],),
        dy_rows, dh_rows, rows, dense(weight), stats, dx, partial, dw, db,
        n_rows, dy_stride, dh_stride, stride, offset, int(fused),
        **plan,
    )  # fmt: skip
    if gradients and not fused:
        block = 16 if width < 512 else 32
        launch(
            add_rows_kernel, (-(-width // block),),
            partial, dw, db, programs, D=width, WIDTH=width * gradients, ROWS=4096 // block, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dx
