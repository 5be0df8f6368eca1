"""The engine of `linear_cross_entropy`: logits of some rows at a time, overwritten by their gradient, and its products.

For each chunk of rows, a matrix product computes the logits z, the row kernel computes the losses and overwrites z by
dz, and matrix products compute dx = dz W and add dzᵀ x to dW. `memory` decides the size of the chunks, or that all rows
are taken at once, in panels of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import accumulator
from ..cross_entropy.row_statistics import Options, Statistics, losses_of
from ..cross_entropy.rows import cross_entropy_rows, partial_gradient, partial_statistics
from .memory import WeightGradient, add_product, logits_view, place_panels, plan_rows
from .vocabulary_parallel import VocabularyShard, wait_all

# Columns of logits whose statistics are computed while they are in the L2 of an H200: 4096 rows of them are 32 MiB.
_L2_COLUMNS = 4096
# Terms of an fp32 sum over the vocabulary.
_FP32_TERMS = 8192
# Bytes of dx that are summed over the panels at a time.
_DX_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Settings:
    """All arguments of the operators that are not tensors, in their order; a softcap of 0.0 is none.

    Attributes:
        chunk_bytes: of logits at a time, beside dW.
        exact: whether a 16-bit dW is rounded once.
        predict: whether to compute the column of each row's largest logit.
        group, ranks, start, total, sum_dx: the fields of `VocabularyShard`.
        want_dx, want_dw, want_db: which gradients to compute.
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
        """The form of a row's loss."""
        return Options(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)

    @property
    def shard(self) -> VocabularyShard:
        """The classes that this process holds."""
        return VocabularyShard(self.group, self.ranks, self.start, self.total, self.sum_dx)

    @property
    def want_gradient(self) -> bool:
        """Whether the gradient of the logits is needed."""
        return self.want_dx or self.want_dw or self.want_db


class Results(NamedTuple):
    """loss [N]; dx, dW and db of Σ scale · loss; prediction [N]. Those that are not wanted are empty."""

    loss: Tensor
    dx: Tensor
    dw: Tensor
    db: Tensor
    prediction: Tensor


def losses_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, scale: Tensor,
    settings: Settings,
) -> Results:  # fmt: skip
    """The losses of the rows, and the gradients of their sum weighted by `scale`.

    Args:
        x: [N, H].
        weight: [V, H], the shard of this process.
        bias: [V].
        target: [N], int64, contiguous.
        class_weight: [V], of the dtype of the losses, contiguous.
        scale: [N], of the dtype of the losses, may be an expanded scalar.
        settings: everything else.
    """
    return _Pass(x, weight, bias, target, class_weight, scale, settings).run()


class _Pass:
    """One pass over the rows: its inputs, its results, and the two ways to go through the logits."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
        scale: Tensor, settings: Settings,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.bias, self.target = x, weight, bias, target
        self.class_weight, self.scale, self.settings = class_weight, scale, settings
        self.options, self.shard = settings.options, settings.shard
        n_rows, hidden = x.shape
        # By the widest shard, so that the collectives of all processes match.
        self.plan = plan_rows(
            n_rows, self.shard.widest, hidden, x.itemsize, settings.want_dw, settings.exact, settings.chunk_bytes
        )
        self.loss = x.new_empty(n_rows, dtype=accumulator(x.dtype))
        # Dense whatever the strides of x are: the all-reduce takes some of its rows at a time.
        self.dx = x.new_empty(x.shape if settings.want_dx else 0)
        self.dw = WeightGradient(x, weight.shape, self.plan.fp32_dw) if settings.want_dw else None
        self.db = x.new_zeros(weight.shape[0] if settings.want_db else 0, dtype=self.loss.dtype)
        self.prediction = x.new_empty(n_rows if settings.predict else 0, dtype=torch.int64)
        self.pending: list[Tensor] = []

    def run(self) -> Results:
        n_rows, chunk_rows = self.x.shape[0], self.plan.chunk_rows
        buffer = self.x.new_empty(self.plan.buffer_size)
        if self.plan.in_panels:
            self._run_panels(buffer)
        else:
            for start in range(0, n_rows, chunk_rows):
                self._run_chunk(slice(start, min(start + chunk_rows, n_rows)), buffer)
        del buffer
        dw = self.x.new_empty(0) if self.dw is None else self.dw.result()
        wait_all(self.pending)
        return Results(self.loss, self.dx, dw if n_rows else dw.zero_(), self.db.to(self.weight.dtype), self.prediction)

    def _run_chunk(self, rows: slice, buffer: Tensor) -> None:
        """Logits, losses and gradients of some rows, all columns at once."""
        columns = slice(0, self.weight.shape[0])
        z = logits_view(buffer, rows.stop - rows.start, columns.stop)
        self._compute_logits(z, rows, columns)
        if self.shard.group:
            whole = self._store_losses(rows, [self._statistics(z, rows, columns)])
            self._overwrite_by_gradient(z, rows, columns, whole)
        else:
            cross_entropy_rows(
                z, self.target[rows], self.scale[rows], self.loss[rows], self.options, self.settings.want_gradient,
                weight=self.class_weight, prediction=self.prediction[rows] if self.settings.predict else None,
            )  # fmt: skip
        if self.settings.want_dx:
            self._dx_of_chunk(z, rows)
            self.pending += self.shard.start_all_reduce(self.dx[rows])
        self._add_to_dw_and_db(z, rows, columns)

    def _run_panels(self, buffer: Tensor) -> None:
        """All rows at once, in panels of the vocabulary that lie in the memory of dW or in the buffer."""
        assert self.dw is not None
        n_rows, vocabulary = self.x.shape[0], self.weight.shape[0]
        rows = slice(0, n_rows)
        panels, _ = place_panels(n_rows, vocabulary, self.x.shape[1])
        logits, parts = [], []
        for panel in panels:
            memory = (self.dw.scratch() if panel.in_dw else buffer)[panel.offset :]
            z = logits_view(memory, n_rows, panel.columns.stop - panel.columns.start)
            for start in range(0, z.shape[1], _L2_COLUMNS):
                part = z[:, start : start + _L2_COLUMNS]
                first = panel.columns.start + start
                columns = slice(first, first + part.shape[1])
                self._compute_logits(part, rows, columns)
                parts.append(self._statistics(part, rows, columns))
            logits.append(z)
        whole = self._store_losses(rows, parts)
        for z, panel in zip(logits, panels, strict=True):
            self._overwrite_by_gradient(z, rows, panel.columns, whole)
        if self.settings.want_dx:
            self._dx_of_panels(logits, [panel.columns for panel in panels])
        for z, panel in reversed(list(zip(logits, panels, strict=True))):
            self._add_to_dw_and_db(z, rows, panel.columns)

    def _compute_logits(self, z: Tensor, rows: slice, columns: slice) -> None:
        x, weight = self.x[rows], self.weight[columns].t()
        if self.bias is None:
            torch.mm(x, weight, out=z)
        elif z.is_contiguous():
            torch.addmm(self.bias[columns], x, weight, out=z)
        else:
            # With padded rows as output, cuBLAS would round the product before it adds the bias.
            bias = self.bias[columns]
            for start in range(0, z.shape[1], _L2_COLUMNS):
                part = slice(start, start + _L2_COLUMNS)
                z[:, part] = torch.addmm(bias[part], x, weight[:, part])

    def _statistics(self, z: Tensor, rows: slice, columns: slice) -> Statistics:
        return partial_statistics(
            z, self.target[rows], self.options, self.shard.columns(columns.start),
            weight=self._class_weight_of(columns), predict=self.settings.predict,
        )  # fmt: skip

    def _store_losses(self, rows: slice, parts: list[Statistics]) -> Statistics:
        """Store losses and predictions of rows; returns their statistics over the whole vocabulary."""
        whole = self.shard.gather_statistics(parts)
        self.loss[rows].copy_(losses_of(whole, self.target[rows], self.options))
        if whole.prediction is not None:
            self.prediction[rows].copy_(whole.prediction)
        return whole

    def _overwrite_by_gradient(self, z: Tensor, rows: slice, columns: slice, whole: Statistics) -> None:
        if self.settings.want_gradient:
            partial_gradient(
                z, self.target[rows], self.scale[rows], whole, self.options, self.shard.columns(columns.start),
                weight=self._class_weight_of(columns),
            )  # fmt: skip

    def _dx_of_chunk(self, dz: Tensor, rows: slice) -> None:
        """dx = dz W. In fp32, where cuBLAS adds up term by term, a sum of partial products is more exact."""
        vocabulary = self.weight.shape[0]
        step = _FP32_TERMS if dz.dtype == torch.float32 else max(vocabulary, 1)
        # max: a process that holds no class still sets dx to 0.
        for start in range(0, max(vocabulary, 1), step):
            part = slice(start, min(start + step, vocabulary))
            add_product(self.dx[rows], dz[:, part], self.weight[part], first=start == 0)

    def _dx_of_panels(self, panels: list[Tensor], columns: list[slice]) -> None:
        """dx = Σ dz W over the panels, in the dtype of the losses, some rows at a time."""
        n_rows, hidden = self.x.shape
        step = max(_DX_BYTES // (hidden * self.loss.itemsize) // 128 * 128, 128)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            total = self.x.new_empty(rows.stop - start, hidden, dtype=self.loss.dtype)
            for dz, part in zip(panels, columns, strict=True):
                add_product(total, dz[rows], self.weight[part], first=part.start == 0)
            self.dx[rows].copy_(total)
            self.pending += self.shard.start_all_reduce(self.dx[rows])

    def _add_to_dw_and_db(self, dz: Tensor, rows: slice, columns: slice) -> None:
        if self.dw is not None:
            self.dw.add(dz, self.x[rows], columns.start, first=rows.start == 0)
        if self.settings.want_db:
            self.db[columns] += dz.sum(0, dtype=self.db.dtype)

    def _class_weight_of(self, columns: slice) -> Tensor | None:
        return None if self.class_weight is None else self.class_weight[columns]
