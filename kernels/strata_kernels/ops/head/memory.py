"""Memory plan of losses over a head: where logits lie, and in which dtype dW accumulates.

Accumulating dW in 16 bits over chunks of rows is less exact than PyTorch, which rounds once: with three to five chunks,
the worst element on data like a language model's has been up to three times as far from fp64. So all rows are taken at
once where memory allows it, and otherwise dW accumulates in fp32.

All rows, in panels: nothing is stored in the memory of dW before the first product for it, so it holds logits until
then. They are split into panels of the vocabulary, which are multiplied from the last to the first: dW overwrites only
panels that have been multiplied already. This memory holds the logits of as many rows as dW has columns, H; the panels
that do not fit lie in a buffer beside it.

Chunks of rows: they take turns in the buffer. The first half of an fp32 dW lies in the memory of the 16-bit result, so
that the sum is converted in place. Where a loss needs whole rows, and more than the student's logits of them, its
gradient may move from the buffer into panels: then no product for dW is added to another one, and dW needs no fp32.

Columns: where the statistics of the rows are known from an earlier pass, no column needs another one. All rows of some
columns at a time take turns in the buffer, each product for dW is final, and dx is summed in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..cross_entropy.rows import padded_width

# On an H200 at 8192x4096x128256, half as many columns save 5 % of the memory and cost 1 % of the speed.
_PANEL_COLUMNS = 16384
# Of an H200.
_MULTIPROCESSORS = 132
# Rows of an fp32 dW that are converted through a copy.
_COPIED_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """How the rows are processed.

    Attributes:
        in_panels: whether all rows are taken at once, their logits in panels; otherwise in chunks of rows.
        chunk_rows: rows of a chunk.
        fp32_dw: whether a 16-bit dW accumulates in fp32.
        buffer_size: elements of the buffer for logits beside dW.
    """

    in_panels: bool
    chunk_rows: int
    fp32_dw: bool
    buffer_size: int


@dataclass(frozen=True)
class Panel:
    """Columns of the vocabulary, and where their logits start: in the memory of dW or in the buffer."""

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
    """The plan where logits may take `chunk_bytes` beside dW.

    For an exact 16-bit dW, panels may take 4·V·H bytes more: twice what accumulating in fp32 takes, which is slow.
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
    """How the rows are processed by a loss that needs whole ones.

    Attributes:
        chunk_rows: rows of a chunk.
        fp32_dw: whether a 16-bit dW accumulates in fp32.
        buffer_size: elements of each of the buffers for a chunk's logits.
        panels_size: elements of the buffer for panels of the gradient beside dW; None where there are no panels.
    """

    chunk_rows: int
    fp32_dw: bool
    buffer_size: int
    panels_size: int | None


def plan_chunks(
    x: Tensor, shape: torch.Size, weight_grad: bool, exact: bool, chunk_bytes: int, tensors: int = 1
) -> ChunkPlan:
    """The plan for x [N, H] and weight of this shape, [V, H], where so many tensors of logits take `chunk_bytes`.

    For an exact 16-bit dW, panels take no more than accumulating in fp32 would.
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
    """Rows of a chunk, at most `max_rows`, with which the products for dx take the least time."""
    if n_rows <= max_rows:
        return n_rows
    if max_rows < 128:
        # Rows that vector loads are aligned to.
        return max(max_rows // 8 * 8, 8)

    def cost(rows: int) -> tuple[int, int, int]:
        # Waves of 128x256 tiles over the multiprocessors.
        chunks, tiles = -(-n_rows // rows), rows // 128 * -(-hidden // 256)
        return chunks * -(-tiles // _MULTIPROCESSORS), chunks, rows

    return min(range(128, max_rows + 1, 128), key=cost)


@dataclass(frozen=True)
class ColumnPlan:
    """How rows with known statistics are processed.

    Attributes:
        rows: rows of a block; all of them, unless they are very many.
        columns: columns of the vocabulary at a time.
        fp32_dw: whether a 16-bit dW accumulates in fp32, over several blocks of rows.
    """

    rows: int
    columns: int
    fp32_dw: bool

    @property
    def buffer_size(self) -> int:
        """Elements of the buffer for logits."""
        return self.rows * padded_width(self.columns)


# Fewer columns at a time make the products slower.
_LEAST_COLUMNS = 2048


def plan_columns(
    n_rows: int, vocabulary: int, itemsize: int, weight_grad: bool, exact: bool, bytes_: int
) -> ColumnPlan:
    """The plan where logits may take `bytes_`; columns in parts of equal size."""
    rows = max(min(n_rows, bytes_ // (min(_LEAST_COLUMNS, vocabulary) * itemsize)), 1)
    columns = max(min(bytes_ // (rows * itemsize), vocabulary), 1)
    if columns < vocabulary:
        step = 128 if columns >= 128 else 1
        parts = math.ceil(vocabulary / (columns // step * step))
        columns = math.ceil(vocabulary / parts / step) * step
    return ColumnPlan(rows, columns, exact and weight_grad and itemsize == 2 and rows < n_rows)


def place_panels(n_rows: int, vocabulary: int, hidden: int) -> tuple[list[Panel], int]:
    """The panels of the logits, from the first to the last, and the elements of the buffer that they need.

    A panel may lie in the memory of dW only before its own columns: dW from these columns on is written first.
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
    """dW [V, H]: a sum of products dzᵀ x, and scratch memory before the first of them."""

    def __init__(self, x: Tensor, shape: torch.Size, in_fp32: bool) -> None:
        self._result = x.new_empty(shape)
        self._parts = [self._result]
        if in_fp32:
            vocabulary, hidden = shape
            # Rows of fp32 that fit into the result; a multiple of 64 keeps the columns of dz behind them aligned.
            half = vocabulary // 128 * 64
            self._parts = [
                self._result.view(-1)[: 2 * half * hidden].view(torch.float32).view(half, hidden),
                x.new_empty(vocabulary - half, hidden, dtype=torch.float32),
            ]

    def scratch(self) -> Tensor:
        """The memory of the result as one row, until the first `add`; not with fp32."""
        return self._result.view(-1)

    def add(self, dz: Tensor, x: Tensor, start: int, first: bool) -> None:
        """Add dzᵀ x for dz [N, columns from `start` on]; `first` stores the product instead of adding it."""
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
        # step overwrites its own rows, and takes a copy.
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
    """Logits [n_rows, width] at the start of `memory`, with rows padded for the kernel."""
    return memory[: n_rows * padded_width(width)].view(n_rows, padded_width(width))[:, :width]


def copy_rows(to: Tensor, of: Tensor) -> None:
    """Copy logits in 16 bits between two views of `logits_view`; PyTorch copies rows that are apart one by one."""
    if of.shape[1] % 4 == 0:
        to, of = to.view(torch.int64), of.view(torch.int64)
    to.copy_(of)
