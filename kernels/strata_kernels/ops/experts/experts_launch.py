"""Launches of the kernels of experts: tile sizes and output buffers."""
# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import launch
from .product_kernels import rows_kernel, weight_bwd_kernel
from .routing_kernels import count_kernel, place_kernel, scan_kernel, tile_kernel
from .row_kernels import bias_bwd_kernel, gate_bwd_kernel, gate_kernel, token_sum_kernel


@dataclass(frozen=True)
class Tile:
    """BM, BN and BK of a matrix product, warps, pipeline stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int

    def of_width(self, width: int) -> Tile:
        """This tile with BN reduced for a result of `width` features, e.g. the rank of an adapter."""
        bn = max(_power_of_2(width), 16)
        return self if bn >= min(self.bn, 128) else replace(self, bn=bn, warps=4)


@dataclass(frozen=True)
class Tiles:
    """Tiles of the products of rows with weights, and of weight gradients."""

    rows: Tile
    weight_bwd: Tile


_WIDE = Tiles(rows=Tile(128, 256, 64, 8, 4), weight_bwd=Tile(128, 256, 64, 8, 3))
_NARROW = Tiles(rows=Tile(64, 128, 64, 4, 4), weight_bwd=Tile(128, 128, 64, 8, 3))
_FP32 = Tiles(rows=Tile(64, 64, 32, 4, 2), weight_bwd=Tile(64, 64, 32, 4, 2))
# Average rows per expert from which most tiles of 128 rows are full.
_FEW_ROWS = 256
# Tile rows per group of `_tile`.
_GROUP = 16
# Block size along the rank of an adapter.
_RANK = 64
# Rows and features per program of the gate kernels.
_ROWS, _COLUMNS = 4, 256


class Activation(NamedTuple):
    """Settings of the gate and activation between the two products, as in the operators' schemas."""

    gate: str
    activation: str
    alpha: float
    limit: float
    offset: float

    def constexprs(self, dtype: torch.dtype) -> dict[str, object]:
        """Constexprs of the gate kernels."""
        return {
            "GATE": self.gate,
            "ACTIVATION": self.activation,
            "PRECISE": dtype == torch.float32,
            "CLAMPED": isfinite(self.limit),
        }


class Routing(NamedTuple):
    """Slots sorted by expert, int32 tensors that `routing_kernels.py` describes.

    positions: [T, K]. rows: [S], S = T · K or `max_slots`. starts: [E + 1]. tiles: [tiles, 2].
    """

    positions: Tensor
    rows: Tensor
    starts: Tensor
    tiles: Tensor


def tiles_of(slots: int, experts: int, dtype: torch.dtype) -> Tiles:
    """The tile sizes for `slots` rows of all experts."""
    if dtype == torch.float32:
        return _FP32
    return _WIDE if slots >= _FEW_ROWS * experts else _NARROW


def empty_routing(index: Tensor, experts: int, dtype: torch.dtype, max_slots: int | None = None) -> Routing:
    """An uninitialized routing with at most `max_slots` rows."""
    slots = index.numel() if max_slots is None else min(max_slots, index.numel())
    bm = tiles_of(slots, experts, dtype).rows.bm
    tiles = slots // bm + min(experts, slots)

    def new(*shape: int) -> Tensor:
        return index.new_empty(shape, dtype=torch.int32)

    return Routing(new(*index.shape), new(slots), new(experts + 1), new(tiles, 2))


def route(index: Tensor, experts: int, dtype: torch.dtype, max_slots: int | None = None) -> Routing:
    """Sort the slots of `index` [T, K], contiguous, by expert, and keep the first `max_slots`."""
    routing = empty_routing(index, experts, dtype, max_slots)
    slots, n_rows, n_tiles = index.numel(), routing.rows.shape[0], routing.tiles.shape[0]
    be, bm = _power_of_2(experts), tiles_of(n_rows, experts, dtype).rows.bm
    block = min(max(16384 // be, 16), 256)
    blocks = -(-slots // block)
    counts = index.new_empty((blocks, experts), dtype=torch.int32)
    totals = index.new_empty(experts, dtype=torch.int32)
    launch(count_kernel, (blocks,), index, counts, slots, experts, BLOCK=block, BE=be, num_warps=4)
    launch(scan_kernel, (experts,), counts, totals, blocks, experts, BLOCK=1024, num_warps=4)
    launch(
        tile_kernel, (-(-n_tiles // 64) or 1,), totals, routing.starts, routing.tiles, n_rows, n_tiles, experts,
        BM=bm, BLOCK=64, BE=be, num_warps=4,
    )  # fmt: skip
    launch(
        place_kernel, (blocks,), index, counts, routing.starts, routing.positions, routing.rows, n_rows, slots, experts,
        BLOCK=block, BE=be, num_warps=4,
    )  # fmt: skip
    return routing


def rows(
    a: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, precision: str, *, of_tokens: bool = False,
    scale: float = 1.0, beside: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """scale · a · weightᵀ + bias + u · vᵀ, [S, N], for weight [E, N, K]: grouped by the rows' experts.

    of_tokens: a is [T, K], rows of tokens, not [S, K], rows of slots.
    beside: u [S, R], contiguous, and v [E, N, R].
    """
    experts, width, size = weight.shape
    slots, top_k = routing.rows.shape[0], routing.positions.shape[1]
    tile = tiles_of(slots, experts, a.dtype).rows.of_width(width)
    y, n_tiles, columns = a.new_empty(slots, width), routing.tiles.shape[0], -(-width // tile.bn)
    u, v = (None, None) if beside is None else beside
    rank, strides = (0, (0, 0, 0)) if v is None else (v.shape[2], v.stride())
    launch(
        rows_kernel, (n_tiles * columns,),
        a, weight, bias, u, v, y, *routing[1:], size, width, rank, n_tiles, columns, a.stride(0), *weight.stride(),
        _row(bias), *strides, scale,
        TOP_K=top_k, GATHER=of_tokens, EVEN=size % tile.bk == 0, PRECISION=precision, GROUP=_GROUP, BM=tile.bm,
        BN=tile.bn, BK=tile.bk, BR=min(max(_power_of_2(rank), 16), _RANK), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return y


def gate(h: Tensor, routing: Routing, between: Activation) -> Tensor:
    """a = gate(h), [S, I]."""
    slots, inner = h.shape[0], inner_of(h.shape[1], between.gate)
    a = h.new_empty(slots, inner)
    launch(
        gate_kernel, (-(-slots // _ROWS), -(-inner // _COLUMNS)),
        h, a, routing.starts, routing.starts.shape[0] - 1, inner, *between[2:],
        **between.constexprs(h.dtype), R=_ROWS, BN=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return a


def token_sums(y: Tensor, router: Tensor | None, routing: Routing) -> Tensor:
    """Σ router · y over the slots of each token."""
    (tokens, top_k), width = routing.positions.shape, y.shape[1]
    out, block = y.new_empty(tokens, width), min(_power_of_2(width), 1024)
    launch(
        token_sum_kernel, (tokens, -(-width // block)), y, router, routing.positions, out, width,
        TOP_K=top_k, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def hidden_bwd(
    do: Tensor, h: Tensor, down: Tensor, bias: Tensor | None, index: Tensor, router: Tensor, routing: Routing,
    between: Activation, precision: str, beside: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh, router · a, gradient of the router weights); beside: added to do · down, as in `rows`."""
    experts, width, inner = down.shape
    a = rows(do, down.transpose(1, 2), None, routing, precision, of_tokens=True, beside=beside)
    # The gradient of slots without an expert is 0.
    dh, d_router = torch.empty_like(h), torch.zeros_like(router)
    launch(
        gate_bwd_kernel, (-(-h.shape[0] // _ROWS),),
        a, h, router, do, bias, index, dh, d_router, routing.rows, routing.starts, experts, inner, width, do.stride(0),
        _row(bias), *between[2:],
        TOP_K=router.shape[1], **between.constexprs(h.dtype), R=_ROWS, BN=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return dh, a, d_router


def weight_bwd(dw: Tensor, dy: Tensor, x: Tensor, of_tokens: str, routing: Routing, precision: str) -> None:
    """dw [E, N, K] = Σ dyᵀ · x over the rows of each expert.

    dy: [S, N] and x: [S, K], except that the one named by `of_tokens` ("dy", "x", or "" for none) has rows of tokens,
    [T, ...].
    """
    strides, gather = (dw.stride(1), dw.stride(2)), {"dy": "l", "x": "r", "": ""}[of_tokens]
    left, right = dy, x
    if strides[1] != 1:
        # Columns of a tile must be contiguous in memory.
        left, right, gather, strides = right, left, {"l": "r", "r": "l", "": ""}[gather], strides[::-1]
    tile = tiles_of(routing.rows.shape[0], dw.shape[0], x.dtype).weight_bwd.of_width(right.shape[1])
    n_l, n_r = -(-left.shape[1] // tile.bm), -(-right.shape[1] // tile.bn)
    launch(
        weight_bwd_kernel, (dw.shape[0] * n_l * n_r,),
        left, right, dw, routing.rows, routing.starts, left.shape[1], right.shape[1], n_l, n_r, left.stride(0),
        right.stride(0), dw.stride(0), *strides,
        TOP_K=routing.positions.shape[1], GATHER=gather, PRECISION=precision, GROUP=_GROUP, BM=tile.bm,
        BN=tile.bn, BK=tile.bk, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def bias_bwd(db: Tensor, dy: Tensor, router: Tensor | None, routing: Routing) -> None:
    """db [E, N] = Σ dy over the rows of each expert; with `router`, dy is [T, N], weighted by it."""
    size = db.shape[1]
    launch(
        bias_bwd_kernel, (db.shape[0], -(-size // 64)),
        dy, router, routing.rows, routing.starts, db, size, dy.stride(0),
        TOP_K=routing.positions.shape[1], BN=64, BK=64, num_warps=4,
    )  # fmt: skip


def inner_of(width: int, gate: str) -> int:
    """I, for h with `width` features."""
    return width // (1 if gate == "none" else 2)


def _row(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.stride(0)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
