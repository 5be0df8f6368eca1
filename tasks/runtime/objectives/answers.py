"""Sums over the answers of a batch. `sides` tells which answer a token belongs to: 1, -1, or 0 for padding."""

from __future__ import annotations

from torch import Tensor

from tasks.runtime.data.dataset import Batch


def begins(batch: Batch) -> Tensor:
    """Whether a token is the first one of a document: [B, T], bool."""
    return batch["position_ids"] == 0


def count_answers(batch: Batch, side: int) -> Tensor:
    """Number of answers of a side."""
    return (begins(batch) & (batch["sides"] == side)).sum()


def sum_by_answer(values: Tensor, batch: Batch, here: Tensor, room: int) -> Tensor:
    """Sums of `values` [B, T] over each answer whose tokens are `here` [B, T], in order, then zeros: [room].

    Only the device knows the number of answers, so `room` is an upper bound. In fp64: the sums are differences of large
    numbers, and must not depend on the order in which a GPU adds them.
    """
    here = here.flatten()
    number = (begins(batch).flatten() & here).cumsum(0) - 1
    sums = values.new_zeros(room + 1, dtype=values.double().dtype)
    return sums.index_add(0, number.where(here, room), values.flatten().double())[:room]
