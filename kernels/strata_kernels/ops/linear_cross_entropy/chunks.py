"""The work of `linear_cross_entropy`: logits a part at a time, their gradient in place, the products from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import accumulator
from ..cross_entropy.rows import cross_entropy_rows, shard_gradient, shard_statistics
from ..cross_entropy.statistics import Options, Statistics, shard_loss
from .memory import WeightGradient, add_product, matrix, place_panels, plan_rows
from .vocabulary_parallel import Cut, finish_sum

# Columns of logits whose statistics are taken while they lie in the L2 of an H200: 4096 rows of them are 32 MiB.
_FRESH_COLUMNS = 4096
# Terms of an fp32 sum over the vocabulary.
_FP32_TERMS = 8192
# dx as a sum over panels, bytes at a time.
_DX_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Settings:
    """All that is no tensor, in the order of the operators' arguments; a softcap of 0.0 is none.

    Attributes:
        chunk_bytes: of logits at a time, beside dW.
        exact: whether a 16-bit dW is rounded once.
        predict: whether the column of each row's largest logit is wanted.
        group, ranks, start, total, sum_dx: the cut of the vocabulary, see `Cut`.
        want_dx, want_dw, want_db: which gradients are wanted.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    chunk_bytes: int
    exact: bool
    predict: bool
    group: str
    ranks: int
    start: int
    total: int
    sum_dx: bool
    want_dx: bool
    want_dw: bool
    want_db: bool

    @property
    def options(self) -> Options:
        """What shapes the loss of a row."""
        return Options(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)

    @property
    def cut(self) -> Cut:
        """The part of the vocabulary that is here."""
        return Cut(self.group, self.ranks, self.start, self.total, self.sum_dx)

    @property
    def want_gradient(self) -> bool:
        """Whether logits are to become their gradient."""
        return self.want_dx or self.want_dw or self.want_db


class Results(NamedTuple):
    """loss [N], dx, dW and db of the losses' sum weighted by scale, prediction [N]; empty where not wanted."""

    loss: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor
    prediction: Tensor


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, scale: Tensor,
    settings: Settings,
) -> Results:  # fmt: skip
    """Losses and gradients of the rows.

    Args:
        x: [N, H]; weight: [V, H], this process's part; bias: [V]; target: [N], int64, contiguous.
        class_weight: [V], of the dtype of the losses, contiguous.
        scale: [N], likewise, what each row's loss is multiplied by in the sum that is differentiated; strides of 0 too.
        settings: all else.
    """
    return _Run(x, weight, bias, target, class_weight, scale, settings).results()


class _Run:
    """One call: what it reads, what it fills, and the two ways to take rows."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        scale: Tensor, settings: Settings,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.bias, self.target = x, weight, bias, target
        self.class_weight, self.scale, self.settings = class_weight, scale, settings
        self.options, self.cut = settings.options, settings.cut
        n_rows, hidden = x.shape
        # By the largest part of the vocabulary, so that the processes of a group exchange in step.
        self.plan = plan_rows(
            n_rows, self.cut.widest, hidden, x.itemsize, settings.want_dw, settings.exact, settings.chunk_bytes
        )
        self.loss = x.new_empty(n_rows, dtype=accumulator(x.dtype))
        # Dense rows, whatever the strides of x: a group sums parts of them.
        self.dx = x.new_empty(x.shape if settings.want_dx else 0)
        self.dw = WeightGradient(x, weight.shape, self.plan.wide) if settings.want_dw else None
        self.db = x.new_zeros(weight.shape[0] if settings.want_db else 0, dtype=self.loss.dtype)
        self.prediction = x.new_empty(n_rows if settings.predict else 0, dtype=torch.int64)
        self.pending: list[Tensor] = []

    def results(self) -> Results:
        n_rows, chunk = self.x.shape[0], self.plan.chunk
        buffer = self.x.new_empty(self.plan.beside)
        if self.plan.together:
            self._together(buffer)
        else:
            for start in range(0, n_rows, chunk):
                self._chunk(slice(start, min(start + chunk, n_rows)), buffer)
        del buffer
        dw = self.x.new_empty(0) if self.dw is None else self.dw.result()
        finish_sum(self.pending)
        return Results(self.loss, self.dx, dw if n_rows else dw.zero_(), self.db.to(self.weight.dtype), self.prediction)

    def _chunk(self, rows: slice, buffer: Tensor) -> None:
        """Rows whose logits lie in the buffer."""
        columns = slice(0, self.weight.shape[0])
        z = matrix(buffer, rows.stop - rows.start, columns.stop)
        self._logits(z, rows, columns)
        if self.cut.group:
            whole = self._finish_rows(rows, [self._statistics(z, rows, columns)])
            self._gradient(z, rows, columns, whole)
        else:
            cross_entropy_rows(
                z, self.target[rows], self.scale[rows], self.loss[rows], self.options, self.settings.want_gradient,
                weight=self.class_weight, prediction=self.prediction[rows] if self.settings.predict else None,
            )  # fmt: skip
        if self.settings.want_dx:
            self._dx_of_rows(z, rows)
            self.pending += self.cut.start_sum(self.dx[rows])
        self._add_columns(z, rows, columns)

    def _together(self, buffer: Tensor) -> None:
        """All rows, their logits in panels of the vocabulary, as far as they fit in the memory of dW."""
        assert self.dw is not None
        n_rows, vocabulary = self.x.shape[0], self.weight.shape[0]
        rows = slice(0, n_rows)
        panels, _ = place_panels(n_rows, vocabulary, self.x.shape[1])
        logits, found = [], []
        for panel in panels:
            memory = (self.dw.memory() if panel.in_dw else buffer)[panel.offset :]
            z = matrix(memory, n_rows, panel.columns.stop - panel.columns.start)
            for start in range(0, z.shape[1], _FRESH_COLUMNS):
                part = z[:, start : start + _FRESH_COLUMNS]
                first = panel.columns.start + start
                columns = slice(first, first + part.shape[1])
                self._logits(part, rows, columns)
                found.append(self._statistics(part, rows, columns))
            logits.append(z)
        whole = self._finish_rows(rows, found)
        for z, panel in zip(logits, panels, strict=True):
            self._gradient(z, rows, panel.columns, whole)
        if self.settings.want_dx:
            self._dx_of_panels(logits, [panel.columns for panel in panels])
        for z, panel in reversed(list(zip(logits, panels, strict=True))):
            self._add_columns(z, rows, panel.columns)

    def _dx_of_rows(self, z: Tensor, rows: slice) -> None:
        """dx: in one product, but in fp32, which cuBLAS adds up one by one, in parts, which are closer to the truth."""
        vocabulary = self.weight.shape[0]
        step = _FP32_TERMS if z.dtype == torch.float32 else max(vocabulary, 1)
        # Also where this process has no column: then dx is 0.
        for start in range(0, max(vocabulary, 1), step):
            part = slice(start, min(start + step, vocabulary))
            add_product(self.dx[rows], z[:, part], self.weight[part], first=start == 0)

    def _dx_of_panels(self, logits: list[Tensor], columns: list[slice]) -> None:
        """dx, a sum over the panels in the dtype of the losses."""
        n_rows, hidden = self.x.shape
        step = max(_DX_BYTES // (hidden * self.loss.itemsize) // 128 * 128, 128)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            total = self.x.new_empty(rows.stop - start, hidden, dtype=self.loss.dtype)
            for z, part in zip(logits, columns, strict=True):
                add_product(total, z[rows], self.weight[part], first=part.start == 0)
            self.dx[rows].copy_(total)
            self.pending += self.cut.start_sum(self.dx[rows])

    def _logits(self, z: Tensor, rows: slice, columns: slice) -> None:
        x, weight = self.x[rows], self.weight[columns].t()
        if self.bias is None:
            torch.mm(x, weight, out=z)
        elif z.is_contiguous():
            torch.addmm(self.bias[columns], x, weight, out=z)
        else:
            # Into rows that are apart cuBLAS rounds the product before it adds the bias.
            bias = self.bias[columns]
            for start in range(0, z.shape[1], _FRESH_COLUMNS):
                part = slice(start, start + _FRESH_COLUMNS)
                z[:, part] = torch.addmm(bias[part], x, weight[:, part])

    def _statistics(self, z: Tensor, rows: slice, columns: slice) -> Statistics:
        return shard_statistics(
            z, self.target[rows], self.options, self.cut.part(columns.start),
            weight=self._classes(columns), predict=self.settings.predict,
        )  # fmt: skip

    def _finish_rows(self, rows: slice, found: list[Statistics]) -> Statistics:
        """The losses and predictions of rows, from the statistics of all their columns here; returns the whole's."""
        whole = self.cut.whole(found)
        self.loss[rows].copy_(shard_loss(whole, self.target[rows], self.options))
        if whole.prediction is not None:
            self.prediction[rows].copy_(whole.prediction)
        return whole

    def _gradient(self, z: Tensor, rows: slice, columns: slice, whole: Statistics) -> None:
        if self.settings.want_gradient:
            shard_gradient(
                z, self.target[rows], self.scale[rows], whole, self.options, self.cut.part(columns.start),
                weight=self._classes(columns),
            )  # fmt: skip

    def _add_columns(self, dz: Tensor, rows: slice, columns: slice) -> None:
        """What dz gives to dW and db."""
        if self.dw is not None:
            self.dw.add(dz, self.x[rows], columns.start, first=rows.start == 0)
        if self.settings.want_db:
            self.db[columns] += dz.sum(0, dtype=self.db.dtype)

    def _classes(self, columns: slice) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight[columns]
