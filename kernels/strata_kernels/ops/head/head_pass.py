"""A pass over the logits of a head: matrix products, and three loops over blocks of logits.

Chunks of rows: a matrix product computes complete rows of logits z, the loss overwrites them with dz, and matrix
products compute dx = dz W and add dzᵀ x to dW. Panels: all rows at once, in blocks of columns whose logits stay in
memory until the loss has the statistics of all columns; a 16-bit dW is rounded once. Columns: blocks of columns of rows
whose statistics are already known, so that no logits are kept. `memory` chooses between the first two, and block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._launch import accumulator
from ..cross_entropy.row_statistics import Statistics
from .memory import ColumnPlan, Plan, WeightGradient, add_product, copy_rows, logits_view, place_panels
from .vocabulary_parallel import VocabularyShard, wait_all

# Columns per product in panels, so that statistics read logits from L2: 4096 rows of them are 32 MiB (H200).
_L2_COLUMNS = 4096
# Terms per fp32 partial sum over the vocabulary.
_FP32_TERMS = 8192
# Bytes per block of rows of dx that is summed over the panels.
_DX_BYTES = 32 * 2**20


class RowLoss(Protocol):
    """A loss that needs complete rows of logits: all columns of this rank."""

    def take(self, z: Tensor, rows: slice) -> None:
        """Store the requested results of the rows; overwrite their logits with the gradient if requested."""


class PartLoss(RowLoss, Protocol):
    """A loss that can also process blocks of vocabulary columns."""

    def statistics(self, z: Tensor, rows: slice, columns: slice) -> Statistics:
        """Statistics of the rows over these columns."""

    def store(self, rows: slice, parts: list[Statistics]) -> Statistics:
        """Store the requested results of the rows; returns their statistics over the whole vocabulary."""

    def overwrite(self, z: Tensor, rows: slice, columns: slice, whole: Statistics) -> None:
        """Overwrite logits with their gradient, if requested."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients are requested."""

    dx: bool
    dw: bool
    db: bool

    @property
    def any(self) -> bool:
        """Whether any is, so that the gradient of the logits is needed."""
        return self.dx or self.dw or self.db


class HeadGradients(NamedTuple):
    """dx [N, H], dW [V, H] and db [V]; empty if not requested."""

    dx: Tensor
    dw: Tensor
    db: Tensor


class HeadPass:
    """One pass over the rows of x [N, H], with the shard weight [V, H] and bias [V] of this rank."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard, wanted: Wanted, *, fp32_dw: bool
    ) -> None:
        self.x, self.weight, self.bias, self.shard, self.wanted = x, weight, bias, shard, wanted
        self._wide = accumulator(x.dtype)
        # Contiguous for any strides of x: blocks of its rows are all-reduced.
        self.dx = x.new_empty(x.shape if wanted.dx else 0)
        self.dw = WeightGradient(x, weight.shape, fp32_dw) if wanted.dw else None
        self.db = x.new_zeros(weight.shape[0] if wanted.db else 0, dtype=self._wide)
        self._pending: list[Tensor] = []

    def run(self, loss: PartLoss, plan: Plan) -> HeadGradients:
        """Process all rows, in panels or chunks as in `plan`."""
        buffer = self.x.new_empty(plan.buffer_size)
        if plan.in_panels:
            self._run_panels(loss, buffer)
            del buffer
            return self._results()
        return self.run_chunks(loss, plan.chunk_rows, buffer)

    def run_chunks(
        self, loss: RowLoss, chunk_rows: int, buffer: Tensor, panels_size: int | None = None
    ) -> HeadGradients:
        """Loop over chunks of `chunk_rows` rows, whose logits are in `buffer`.

        With `panels_size`, dz of all rows is kept in panels, in dW's memory and a buffer of `panels_size` elements.
        """
        n_rows, columns = self.x.shape[0], slice(0, self.weight.shape[0])
        panels = [] if panels_size is None else self._panels(self.x.new_empty(panels_size))
        for start in range(0, n_rows, chunk_rows):
            rows = slice(start, min(start + chunk_rows, n_rows))
            z = logits_view(buffer, rows.stop - start, columns.stop)
            logits_into(z, self.x[rows], self.weight, self.bias)
            loss.take(z, rows)
            if self.wanted.dx:
                self._dx_of_chunk(z, rows)
                self._pending += self.shard.start_all_reduce(self.dx[rows])
            if panels_size is None:
                self._add_to_dw_and_db(z, rows, columns)
            for dz, part in panels:
                copy_rows(dz[rows], z[:, part])
        del buffer
        while panels:
            self._add_to_dw_and_db(panels[-1][0], slice(0, n_rows), panels[-1][1])
            panels.pop()
        return self._results()

    def run_columns(self, loss: PartLoss, whole: Statistics, plan: ColumnPlan) -> HeadGradients:
        """Only gradients, of rows with known statistics `whole` over the whole vocabulary."""
        n_rows, vocabulary = self.x.shape[0], self.weight.shape[0]
        buffer = self.x.new_empty(plan.buffer_size)
        for start in range(0, n_rows, plan.rows):
            rows = slice(start, min(start + plan.rows, n_rows))
            known = whole.of(rows)
            dx = self.x.new_empty((rows.stop - start, self.x.shape[1]) if self.wanted.dx else 0, dtype=self._wide)
            for first in range(0, vocabulary, plan.columns):
                columns = slice(first, min(first + plan.columns, vocabulary))
                z = logits_view(buffer, rows.stop - start, columns.stop - first)
                self._compute_logits(z, rows, columns)
                loss.overwrite(z, rows, columns, known)
                if self.wanted.dx:
                    self._add_to_dx(dx, z, columns)
                self._add_to_dw_and_db(z, rows, columns)
            if self.wanted.dx:
                # A rank without classes must set dx to 0.
                self.dx[rows].copy_(dx if vocabulary else dx.zero_())
                self._pending += self.shard.start_all_reduce(self.dx[rows])
        del buffer
        return self._results()

    def _results(self) -> HeadGradients:
        dw = self.x.new_empty(0) if self.dw is None else self.dw.result()
        wait_all(self._pending)
        return HeadGradients(self.dx, dw if self.x.shape[0] else dw.zero_(), self.db.to(self.weight.dtype))

    def _run_panels(self, loss: PartLoss, buffer: Tensor) -> None:
        """All rows at once, in panels of vocabulary columns, in dW's memory or in `buffer`."""
        rows, panels, parts = slice(0, self.x.shape[0]), self._panels(buffer), []
        for z, panel in panels:
            for start in range(0, z.shape[1], _L2_COLUMNS):
                part = z[:, start : start + _L2_COLUMNS]
                first = panel.start + start
                columns = slice(first, first + part.shape[1])
                self._compute_logits(part, rows, columns)
                parts.append(loss.statistics(part, rows, columns))
        whole = loss.store(rows, parts)
        for z, panel in panels:
            loss.overwrite(z, rows, panel, whole)
        if self.wanted.dx:
            self._dx_of_panels(panels)
        for z, panel in reversed(panels):
            self._add_to_dw_and_db(z, rows, panel)

    def _panels(self, buffer: Tensor) -> list[tuple[Tensor, slice]]:
        """(logits [N, columns] in dW's memory or in `buffer`, their vocabulary columns) of each panel."""
        assert self.dw is not None
        (n_rows, hidden), scratch = self.x.shape, self.dw.scratch()
        panels, _ = place_panels(n_rows, self.weight.shape[0], hidden)
        return [
            (logits_view((scratch if panel.in_dw else buffer)[panel.offset :], n_rows, panel.width), panel.columns)
            for panel in panels
        ]

    def _compute_logits(self, z: Tensor, rows: slice, columns: slice) -> None:
        logits_into(z, self.x[rows], self.weight[columns], None if self.bias is None else self.bias[columns])

    def _dx_of_chunk(self, dz: Tensor, rows: slice) -> None:
        """dx = dz W. In fp32, where cuBLAS sums sequentially, as a more accurate sum of partial products."""
        vocabulary = self.weight.shape[0]
        step = _FP32_TERMS if dz.dtype == torch.float32 else max(vocabulary, 1)
        # max: a rank without classes must set dx to 0.
        for start in range(0, max(vocabulary, 1), step):
            part = slice(start, min(start + step, vocabulary))
            add_product(self.dx[rows], dz[:, part], self.weight[part], first=start == 0)

    def _add_to_dx(self, total: Tensor, dz: Tensor, columns: slice) -> None:
        """total += dz W over these columns; total = dz W for the first columns."""
        step = _FP32_TERMS if dz.dtype == torch.float32 else dz.shape[1]
        for start in range(0, dz.shape[1], step):
            part = slice(columns.start + start, min(columns.start + start + step, columns.stop))
            add_product(total, dz[:, start : start + step], self.weight[part], first=part.start == 0)

    def _dx_of_panels(self, panels: list[tuple[Tensor, slice]]) -> None:
        """dx = Σ dz W over the panels, in the dtype of the losses, in blocks of rows."""
        n_rows, hidden = self.x.shape
        step = max(_DX_BYTES // (hidden * self._wide.itemsize) // 128 * 128, 128)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            total = self.x.new_empty(rows.stop - start, hidden, dtype=self._wide)
            for dz, part in panels:
                add_product(total, dz[rows], self.weight[part], first=part.start == 0)
            self.dx[rows].copy_(total)
            self._pending += self.shard.start_all_reduce(self.dx[rows])

    def _add_to_dw_and_db(self, dz: Tensor, rows: slice, columns: slice) -> None:
        if self.dw is not None:
            self.dw.add(dz, self.x[rows], columns.start, first=rows.start == 0)
        if self.wanted.db:
            self.db[columns] += dz.sum(0, dtype=self.db.dtype)


def logits_into(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """z = x Wᵀ + b, for z [N, V] whose rows may be padded."""
    if bias is None:
        torch.mm(x, weight.t(), out=z)
    elif z.is_contiguous():
        torch.addmm(bias, x, weight.t(), out=z)
    else:
        # For padded rows of the output, cuBLAS would round the product before adding the bias.
        for start in range(0, z.shape[1], _L2_COLUMNS):
            part = slice(start, start + _L2_COLUMNS)
            z[:, part] = torch.addmm(bias[part], x, weight[part].t())
