"""Cross entropy as a `PartLoss` of `ops.head`: the computation on each chunk of logits, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import accumulator
from ..cross_entropy.row_statistics import Options, Statistics, losses_of
from ..cross_entropy.rows import cross_entropy_rows, partial_gradient, partial_statistics
from ..head.head_pass import HeadGradients, HeadPass, Wanted
from ..head.memory import plan_columns, plan_rows
from ..head.vocabulary_parallel import VocabularyShard

# Divisor of `chunk_bytes` in the backward pass from saved statistics. With 8192 rows, a chunk has 20480 columns, and
# its matrix products are as fast as those of all columns.
_COLUMNS_SHARE = 2


@dataclass(frozen=True)
class Settings:
    """The non-tensor arguments of the operators, in schema order; softcap 0.0 is none.

    Attributes:
        chunk_bytes: bytes of logits per chunk, outside dW's buffer.
        exact: whether a 16-bit dW is rounded once.
        predict: whether to compute the argmax of each row.
        entropy: whether to compute `Statistics.mean` of each row, from which its entropy is computed.
        group, ranks, start, total, sum_dx: the fields of `VocabularyShard`.
        want_dx, want_dw, want_db: which gradients to compute.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    temperature: float
    chunk_bytes: int
    exact: bool
    predict: bool
    entropy: bool
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
        """Options of a row's loss."""
        return Options(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.temperature)

    @property
    def shard(self) -> VocabularyShard:
        """The vocabulary shard of this rank."""
        return VocabularyShard(self.group, self.ranks, self.start, self.total, self.sum_dx)

    @property
    def wanted(self) -> Wanted:
        """Which gradients to compute."""
        return Wanted(self.want_dx, self.want_dw, self.want_db)


class Rows(NamedTuple):
    """Results of N rows; empty tensors for what is not requested.

    loss: [N]. prediction: [N], int64. largest, log_sum, lse_weight, mean: [N], the fields of `Statistics`.
    """

    loss: Tensor
    prediction: Tensor
    largest: Tensor
    log_sum: Tensor
    lse_weight: Tensor
    mean: Tensor

    @classmethod
    def empty(cls, x: Tensor, settings: Settings, *, class_weight: bool, statistics: bool) -> Rows:
        """Uninitialized results for x [N, H]."""
        n_rows, dtype = x.shape[0], accumulator(x.dtype)

        def field(wanted: bool) -> Tensor:
            return x.new_empty(n_rows if wanted else 0, dtype=dtype)

        return cls(
            field(True),
            x.new_empty(n_rows if settings.predict else 0, dtype=torch.int64),
            field(statistics),
            field(statistics),
            field(statistics and class_weight),
            field(settings.entropy),
        )


def losses_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, scale: Tensor | None,
    settings: Settings,
    *, statistics: bool = False,
) -> tuple[Rows, HeadGradients]:  # fmt: skip
    """The losses of the rows, and the gradients of their sum weighted by `scale`.

    Args:
        x: [N, H].
        weight: [V, H], the shard of this rank.
        bias: [V].
        target: [N], int64, contiguous.
        class_weight: [V], dtype of the losses, contiguous.
        scale: [N], dtype of the losses, may be an expanded scalar; None if no gradient is computed.
        settings: all other arguments.
        statistics: whether to return the statistics that `gradients_of_rows` needs.
    """
    shard, wanted = settings.shard, settings.wanted
    # Planned for the widest shard, so that all ranks issue the same collectives.
    plan = plan_rows(
        x.shape[0], shard.widest, x.shape[1], x.itemsize, wanted.dw, settings.exact, settings.chunk_bytes
    )  # fmt: skip
    found = Rows.empty(x, settings, class_weight=class_weight is not None, statistics=statistics)
    loss = _CrossEntropy(target, class_weight, scale, None, settings, found)
    gradients = HeadPass(x, weight, bias, shard, wanted, fp32_dw=plan.fp32_dw).run(loss, plan)
    return found, gradients


def gradients_of_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, scale: Tensor,
    entropy_scale: Tensor | None, whole: Statistics, settings: Settings,
) -> HeadGradients:  # fmt: skip
    """The gradients of Σ scale · loss + entropy_scale · entropy, from the statistics of the rows.

    Arguments as in `losses_and_gradients`; entropy_scale [N] as scale.
    """
    shard, wanted = settings.shard, settings.wanted
    plan = plan_columns(
        x.shape[0], weight.shape[0], x.itemsize, wanted.dw, settings.exact, settings.chunk_bytes // _COLUMNS_SHARE
    )
    loss = _CrossEntropy(target, class_weight, scale, entropy_scale, settings, None)
    return HeadPass(x, weight, bias, shard, wanted, fp32_dw=plan.fp32_dw).run_columns(loss, whole, plan)


class _CrossEntropy:
    """The `PartLoss` of cross entropy: fills `found`, and scales gradients by `scale` and `entropy_scale`."""

    def __init__(
        self, target: Tensor, class_weight: Tensor | None, scale: Tensor | None, entropy_scale: Tensor | None,
        settings: Settings, found: Rows | None,
    ) -> None:  # fmt: skip
        self._target, self._class_weight = target, class_weight
        self._scale, self._entropy_scale = scale, entropy_scale
        self._settings, self._found = settings, found
        self._options, self._shard = settings.options, settings.shard

    def take(self, z: Tensor, rows: slice) -> None:
        columns = slice(0, z.shape[1])
        if self._shard.group:
            self.overwrite(z, rows, columns, self.store(rows, [self.statistics(z, rows, columns)]))
            return
        assert self._found is not None
        kept = {name: x[rows] for name, x in self._found._asdict().items() if x.numel()}
        cross_entropy_rows(
            z, self._target[rows], None if self._scale is None else self._scale[rows], kept.pop("loss"), self._options,
            self._settings.wanted.any, weight=self._class_weight, **kept,
        )  # fmt: skip

    def statistics(self, z: Tensor, rows: slice, columns: slice) -> Statistics:
        return partial_statistics(
            z, self._target[rows], self._options, self._shard.columns(columns.start),
            weight=self._class_weight_of(columns), predict=self._settings.predict, mean=self._settings.entropy,
        )  # fmt: skip

    def store(self, rows: slice, parts: list[Statistics]) -> Statistics:
        assert self._found is not None
        whole = self._shard.gather_statistics(parts)
        self._found.loss[rows].copy_(losses_of(whole, self._target[rows], self._options))
        for field, place in self._found._asdict().items():
            if field != "loss" and place.numel():
                place[rows].copy_(getattr(whole, field))
        return whole

    def overwrite(self, z: Tensor, rows: slice, columns: slice, whole: Statistics) -> None:
        if self._settings.wanted.any:
            assert self._scale is not None
            partial_gradient(
                z, self._target[rows], self._scale[rows], whole, self._options, self._shard.columns(columns.start),
                weight=self._class_weight_of(columns),
                entropy_scale=None if self._entropy_scale is None else self._entropy_scale[rows],
            )  # fmt: skip

    def _class_weight_of(self, columns: slice) -> Tensor | None:
        return None if self._class_weight is None else self._class_weight[columns]
