"""Where `linear_cross_entropy` keeps logits, and how dW adds up.

A sum that is rounded to 16 bits after every part of the rows soon is less exact than PyTorch's, which rounds once: with
three to five parts up to three times as far from fp64, at the worst element of data like a language model's. So all
rows are taken together where memory allows it, and otherwise dW is summed in fp32.

Together: the memory of dW holds nothing until the first product is written to it, so logits lie there until then. They
are cut into panels of the vocabulary, which are multiplied from the last to the first: what dW receives is written over
panels that are done with. As many rows fit as dW has columns, H; a buffer takes the panels that find no place.

In chunks: rows take turns in the buffer. The first half of an fp32 dW lies in the memory of the 16-bit result, so that
the sum becomes the result in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..cross_entropy.rows import padded

# Columns of a panel. On an H200 at 8192x4096x128256 half as many save 5 % of the memory and cost 1 % of speed.
_PANEL = 16384
# Of an H200.
_MULTIPROCESSORS = 132
# Rows of an fp32 dW that are converted by way of a copy.
_COPIED_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """How rows are taken.

    Attributes:
        together: whether all rows are, with their logits in panels.
        chunk: rows at a time otherwise.
        wide: whether a 16-bit dW is summed in fp32.
        beside: elements of the buffer.
    """

    together: bool
    chunk: int
    wide: bool
    beside: int


@dataclass(frozen=True)
class Panel:
    """Columns of the vocabulary, and where their logits start: in the memory of dW or in the buffer."""

    columns: slice
    in_dw: bool
    offset: int


@cache
def plan_rows(
    n_rows: int, vocabulary: int, hidden: int, itemsize: int, weight_grad: bool, exact: bool, budget: int
) -> Plan:
    """How rows are taken where `budget` bytes of logits may be held beside dW.

    An exact sum of a 16-bit dW may take twice as much for logits as an fp32 copy of dW would: sums in fp32 are slow.
    """
    row = padded(vocabulary)
    most = max(budget // (row * itemsize), 1)
    narrow = exact and weight_grad and itemsize == 2
    if weight_grad and n_rows > most and vocabulary > _PANEL:
        beside = place_panels(n_rows, vocabulary, hidden)[1]
        if beside * itemsize <= budget + 2 * narrow * vocabulary * hidden * itemsize:
            return Plan(True, n_rows, False, beside)
    chunk = max(min(n_rows, _chunk_rows(n_rows, hidden, most)), 1)
    return Plan(False, chunk, narrow and n_rows > chunk, min(chunk, n_rows) * row)


def _chunk_rows(n_rows: int, hidden: int, most: int) -> int:
    """Rows of a chunk, `most` at the most, for which the products for dx are done soonest."""
    if n_rows <= most:
        return n_rows
    if most < 128:
        # What loads align to.
        return max(most // 8 * 8, 8)

    def cost(rows: int) -> tuple[int, int, int]:
        # The tiles of a product, 128x256 large, take their turns on all multiprocessors.
        chunks, tiles = -(-n_rows // rows), rows // 128 * -(-hidden // 256)
        return chunks * -(-tiles // _MULTIPROCESSORS), chunks, rows

    return min(range(128, most + 1, 128), key=cost)


def place_panels(n_rows: int, vocabulary: int, hidden: int) -> tuple[list[Panel], int]:
    """The panels of the logits, from the first to the last, and the elements of the buffer that they need.

    A panel may lie in dW before its own columns: those from them on are written before it is done with.
    """
    used, beside, panels = 0, 0, []
    for start in range(0, vocabulary, _PANEL):
        columns = slice(start, min(start + _PANEL, vocabulary))
        size = n_rows * padded(columns.stop - start)
        in_dw = used + size <= start * hidden
        panels.append(Panel(columns, in_dw, used if in_dw else beside))
        used, beside = (used + size, beside) if in_dw else (used, beside + size)
    return panels, beside


class WeightGradient:
    """dW [V, H]: a sum of products dzᵀ x, and memory until the first of them."""

    def __init__(self, x: Tensor, shape: torch.Size, wide: bool) -> None:
        self._result = x.new_empty(shape)
        self._parts = [self._result]
        if wide:
            vocabulary, hidden = shape
            # Rows of fp32 that fit into the result; a multiple of 64 aligns the columns of dz after them.
            half = vocabulary // 128 * 64
            self._parts = [
                self._result.view(-1)[: 2 * half * hidden].view(torch.float32).view(half, hidden),
                x.new_empty(vocabulary - half, hidden, dtype=torch.float32),
            ]

    def memory(self) -> Tensor:
        """All elements, in one row; not while they are fp32."""
        return self._result.view(-1)

    def add(self, dz: Tensor, x: Tensor, start: int, first: bool) -> None:
        """Add the product of dz [N, columns from `start` on] and x; the first one for these columns is stored."""
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
        # In place: a row of the result lies where rows before it lay. From the second step on they are apart.
        start = min(_COPIED_ROWS, first.shape[0])
        self._result[:start] = first[:start].clone()
        while start < first.shape[0]:
            stop = min(2 * start, first.shape[0])
            self._result[start:stop] = first[start:stop]
            start = stop
        self._result[start:] = second
        return self._result


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first product, total += a @ b after it; `total` may be wider than a and b."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def matrix(memory: Tensor, n_rows: int, width: int) -> Tensor:
    """[n_rows, width] at the start of memory, its rows as far apart as the kernels want them."""
    return memory[: n_rows * padded(width)].view(n_rows, padded(width))[:, :width]
