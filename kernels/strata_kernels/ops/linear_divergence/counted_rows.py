"""The rows that are not ignored, and the operator arguments made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .._launch import accumulator
from ..divergence.given_logits import row_divisor
from ..head.head_arguments import (
    Accumulate,
    autocast,
    check_dtypes,
    kept_rows,
    logits_bytes,
    nan_beyond,
    wanted_gradients,
)
from ..head.vocabulary_parallel import VocabularyShard


class RowOptions(NamedTuple):
    """Arguments of the public functions: ignored rows, reduction, memory of logits."""

    ignore_index: int
    reduction: Literal["mean", "sum"]
    num_items: int | Tensor | None
    max_targets: int | None
    accumulate: Accumulate
    chunk_bytes: int | None


class CountedRows(NamedTuple):
    """The student's rows that are not ignored, at most `max_targets`.

    x, weight, bias: [N, H], [V, H] and [V], same dtype.
    labels: [N].
    beside: other tensors of these rows, each [N, ...].
    divisor: divisor of the sum of their losses.
    beyond: NaN if more than `max_targets` rows are not ignored, else 1; None without `max_targets`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    beside: tuple[Tensor, ...]
    divisor: Tensor
    beyond: Tensor | None

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        beside: tuple[Tensor, ...],
        options: RowOptions,
        sum_over_row_shards: Callable[[Tensor], Tensor] = lambda count: count,
    ) -> CountedRows:
        """Flatten and select rows; x, target and `beside` have the same leading shape. Raises ValueError for dtypes."""
        x, weight, bias = autocast(x, weight, bias)
        check_dtypes(x, weight, bias)
        labels, rows = target.reshape(-1).contiguous(), [t.flatten(0, -2) for t in (x, *beside)]
        divisor = row_divisor(labels, options.ignore_index, options.reduction, options.num_items, accumulator(x.dtype))
        if options.reduction == "mean" and options.num_items is None:
            divisor = sum_over_row_shards(divisor)
        kept, beyond = kept_rows(labels, options.ignore_index, options.max_targets), None
        if kept is not None:
            beyond = nan_beyond(labels, options.ignore_index, kept.shape[0])
            rows, labels = [t.index_select(0, kept) for t in rows], labels[kept]
        return cls(rows[0], weight, bias, labels, tuple(rows[1:]), divisor, beyond)

    def logits(self) -> Tensor:
        """The student's logits [N, V]."""
        return functional.linear(self.x, self.weight, self.bias)

    def arguments(self) -> tuple[Tensor | None, ...]:
        """The leading, tensor arguments of an operator."""
        # In fp16, gradients / N would underflow: `finished` divides the loss, so that N divides the loss scale.
        divisor = torch.ones_like(self.divisor) if self._divides_late else self.divisor
        return divisor, self.x, self.weight, self.bias, self.labels, *self.beside

    def pass_settings(
        self, options: RowOptions, heads: int = 1, shard: VocabularyShard | None = None
    ) -> tuple[Any, ...]:
        """The trailing, plain arguments of an operator. heads: number of heads whose logits are live at a time."""
        memory = logits_bytes(self.x, options.chunk_bytes, tensors=heads), options.accumulate == "exact"
        return *memory, *(() if shard is None else astuple(shard)), *wanted_gradients(self.x, self.weight, self.bias)

    def finished(self, loss: Tensor) -> Tensor:
        """The public function's result, from the operator's result for `arguments`."""
        return self.bounded(loss / self.divisor if self._divides_late else loss)

    def bounded(self, loss: Tensor) -> Tensor:
        """loss, or NaN if more than `max_targets` rows are not ignored."""
        return loss if self.beyond is None else loss * self.beyond

    @property
    def _divides_late(self) -> bool:
        return self.x.dtype == torch.float16
