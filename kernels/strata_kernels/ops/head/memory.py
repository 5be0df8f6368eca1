"""Memory plan of losses over a head: buffers of logits, and the dtype in which dW accumulates.

Accumulating dW in 16 bits over chunks of rows is less accurate than PyTorch, which rounds once: with three to five
chunks on language-model data, the maximum error against fp64 was up to three times PyTorch's. So, if memory allows, all
rows are processed at once, and otherwise dW accumulates in fp32.

Panels (all rows): dW's memory is unused before the first product for dW, so it can hold logits until then. Logits are
split into panels of vocabulary columns, and dW is computed from the last panel to the first, so that it overwrites only
panels that are no longer needed. dW's memory holds the logits of H rows; panels that do not fit are in a buffer.

Chunks of rows: all chunks use the same buffer. The first half of an fp32 dW is in the memory of the 16-bit result, so
that the sum is converted in place. A loss that needs complete rows of two models' logits may copy its dz from the
buffer into panels: then dW is one product per panel and needs no fp32.

Columns: if the statistics of the rows are known from an earlier pass, blocks of columns are independent. All blocks use
the same buffer, each computes its rows of dW in one product, and dx is accumulated in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..cross_entropy.rows import padded_width

# Vocabulary columns per panel. Half as many save 5 % memory and cost 1 % speed (H200, 8192x4096x128256).
_PANEL_COLUMNS = 16384
# Multiprocessors of an H200.
_MULTIPROCESSORS = 132
# Rows of an fp32 dW that are converted with a copy, not in place.
_COPIED_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """Plan of a pass in panels or chunks.

    Attributes:
        in_panels: whether all rows are processed at once, in panels; otherwise in chunks of rows.
        chunk_rows: rows per chunk.
        fp32_dw: whether a 16-bit dW accumulates in fp32.
        buffer_size: elements of the buffer for logits, outside dW's memory.
    """

    in_panels: bool
    chunk_rows: int
    fp32_dw: bool
    buffer_size: int


@dataclass(frozen=True)
class Panel:
    """Columns of the vocabulary, and the offset of their logits, in dW's memory or in the buffer."""

    columns: slice
    in_dw: bool
    offset: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return int(self.columns.stop - self.columns.start)


@cache
def plan_rows(
    n_rows: int, vocabulary: int, hidden: int, itemsize: int, weight_grad: bool, exact: bool, chunk_bytes: int
) -> Plan:
    """The plan for `chunk_bytes` of logits outside dW's memory.

    For an exact 16-bit dW, panels may use 4·V·H more bytes: twice as many as an fp32 dW, which is slower.
    """
    row = padded_width(vocabulary)
    max_rows = max(chunk_bytes // (row * itemsize), 1)
    round_once = exact and weight_grad and itemsize == 2
    if weight_grad and n_rows > max_rows and vocabulary > _PANEL_COLUMNS:
        buffer_size = place_panels(n_rows, vocabulary, hidden)[1]
        if buffer_size * itemsize <= chunk_bytes + 2 * round_once * vocabulary * hidden * itemsize:
            return Plan(True, n_rows, False, buffer_size)
    chunk_rows = max(min(n_rows, _chunk_rows(n_rows, hidden, max_rows)), 1)
    return Plan(False, chunk_rows, round_once and n_rows > chunk_rows, min(chunk_rows, n_rows) * row)


@dataclass(frozen=True)
class ChunkPlan:
    """Plan of a pass in chunks, for a loss that needs complete rows.

    Attributes:
        chunk_rows: rows per chunk.
        fp32_dw: whether a 16-bit dW accumulates in fp32.
        buffer_size: elements of each buffer for a chunk's logits.
        panels_size: elements of the buffer for panels of dz, outside dW's memory; None without panels.
    """

    chunk_rows: int
    fp32_dw: bool
    buffer_size: int
    panels_size: int | None


def plan_chunks(
    x: Tensor, shape: torch.Size, weight_grad: bool, exact: bool, chunk_bytes: int, tensors: int = 1
) -> ChunkPlan:
    """The plan for x [N, H] and a weight of `shape` [V, H], if `tensors` buffers of logits have `chunk_bytes`.

    For an exact 16-bit dW, panels use at most as much memory as an fp32 dW.
    """
    n_rows, (vocabulary, hidden), row = x.shape[0], shape, padded_width(shape[0]) * x.itemsize
    rows = max(_chunk_rows(n_rows, hidden, max(chunk_bytes // (tensors * row), 1)), 1)
    round_once = exact and weight_grad and x.itemsize == 2 and n_rows > rows
    panels_size = None
    if round_once and vocabulary > _PANEL_COLUMNS:
        size = place_panels(n_rows, vocabulary, hidden)[1]
        beside = size * x.itemsize
        if beside <= chunk_bytes // 2 + vocabulary * hidden * x.itemsize:
            left = max(chunk_bytes - beside, chunk_bytes // 2)
            rows, panels_size = max(_chunk_rows(n_rows, hidden, max(left // (tensors * row), 1)), 1), size
    buffer_size = min(rows, n_rows) * padded_width(vocabulary)
    return ChunkPlan(rows, round_once and panels_size is None, buffer_size, panels_size)


def _chunk_rows(n_rows: int, hidden: int, max_rows: int) -> int:
    """Rows per chunk, at most `max_rows`, that minimize the time of the products for dx."""
    if n_rows <= max_rows:
        return n_rows
    if max_rows < 128:
        # A multiple of 8, for aligned vector loads.
        return max(max_rows // 8 * 8, 8)

    def cost(rows: int) -> tuple[int, int, int]:
        # Waves of 128x256 tiles over the multiprocessors.
        chunks, tiles = -(-n_rows // rows), rows // 128 * -(-hidden // 256)
        return chunks * -(-tiles // _MULTIPROCESSORS), chunks, rows

    return min(range(128, max_rows + 1, 128), key=cost)


@dataclass(frozen=True)
class ColumnPlan:
    """Plan of a pass in columns.

    Attributes:
        rows: rows per block; all rows, unless there are very many.
        columns: vocabulary columns per block.
        fp32_dw: whether a 16-bit dW accumulates in fp32, over several blocks of rows.
    """

    rows: int
    columns: int
    fp32_dw: bool

    @property
    def buffer_size(self) -> int:
        """Elements of the buffer for logits."""
        return self.rows * padded_width(self.columns)


# With fewer columns per block, matrix products are slower.
_LEAST_COLUMNS = 2048


def plan_columns(
    n_rows: int, vocabulary: int, itemsize: int, weight_grad: bool, exact: bool, bytes_: int
) -> ColumnPlan:
    """The plan for `bytes_` of logits, with blocks of about equal width."""
    rows = max(min(n_rows, bytes_ // (min(_LEAST_COLUMNS, vocabulary) * itemsize)), 1)
    columns = max(min(bytes_ // (rows * itemsize), vocabulary), 1)
    if columns < vocabulary:
        step = 128 if columns >= 128 else 1
        parts = math.ceil(vocabulary / (columns // step * step))
        columns = math.ceil(vocabulary / parts / step) * step
    return ColumnPlan(rows, columns, exact and weight_grad and itemsize == 2 and rows < n_rows)


def place_panels(n_rows: int, vocabulary: int, hidden: int) -> tuple[list[Panel], int]:
    """(panels in column order, elements of the buffer that they need).

    A panel in dW's memory must lie before dW's rows of its columns, because later rows of dW are written first.
    """
    in_dw_size, buffer_size, panels = 0, 0, []
    for start in range(0, vocabulary, _PANEL_COLUMNS):
        columns = slice(start, min(start + _PANEL_COLUMNS, vocabulary))
        size = n_rows * padded_width(columns.stop - start)
        in_dw = in_dw_size + size <= start * hidden
        panels.append(Panel(columns, in_dw, in_dw_size if in_dw else buffer_size))
        if in_dw:
            in_dw_size += size
        else:
            buffer_size += size
    return panels, buffer_size


class WeightGradient:
    """dW [V, H]: accumulates products dzᵀ x; before the first product, its memory is usable as scratch."""

    def __init__(self, x: Tensor, shape: torch.Size, in_fp32: bool) -> None:
        self._result = x.new_empty(shape)
        self._parts = [self._result]
        if in_fp32:
            vocabulary, hidden = shape
            # fp32 rows that fit into the result; a multiple of 64, so that columns of dz after them are aligned.
            half = vocabulary // 128 * 64
            self._parts = [
                self._result.view(-1)[: 2 * half * hidden].view(torch.float32).view(half, hidden),
                x.new_empty(vocabulary - half, hidden, dtype=torch.float32),
            ]

    def scratch(self) -> Tensor:
        """The result's memory, flat, usable until the first `add`; not if `in_fp32`."""
        return self._result.view(-1)

    def add(self, dz: Tensor, x: Tensor, start: int, first: bool) -> None:
        """Add dzᵀ x, or store it if `first`; dz [N, C]: columns `start` to `start + C` of the vocabulary."""
        begin = 0
        for part in self._parts:
            low, high = max(start, begin), min(start + dz.shape[1], begin + part.shape[0])
            if low < high:
                add_product(part[low - begin : high - begin], dz[:, low - start : high - start].t(), x, first)
            begin += part.shape[0]

    def result(self) -> Tensor:
        """The sum in the dtype of x."""
        if len(self._parts) == 1:
            return self._result
        first, second = self._parts
        # Row r of the result overwrites row r / 2 of the fp32 sum, which an earlier step has converted. Only the first
        # step overwrites its own input, and so needs a copy.
        start = min(_COPIED_ROWS, first.shape[0])
        self._result[:start] = first[:start].clone()
        while start < first.shape[0]:
            stop = min(2 * start, first.shape[0])
            self._result[start:stop] = first[start:stop]
            start = stop
        self._result[start:] = second
        return self._result


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b if `first`, else total += a @ b; `total` may have a wider dtype than a and b."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def logits_view(memory: Tensor, n_rows: int, width: int) -> Tensor:
    """Logits [n_rows, width] at the start of `memory`, with padded rows."""
    return memory[: n_rows * padded_width(width)].view(n_rows, padded_width(width))[:, :width]


def copy_rows(to: Tensor, of: Tensor) -> None:
    """Copy 16-bit logits between two `logits_view`s, in 8-byte words: PyTorch copies strided rows by element."""
    if of.shape[1] % 4 == 0:
        to, of = to.view(torch.int64), of.view(torch.int64)
    to.copy_(of)
