"""The objective's loss and metrics on the validation split: means over all of its items, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Subset

from tasks.runtime.data import RowDataset
from tasks.runtime.data.context_shards import shard_collate
from tasks.runtime.data.dataset import IGNORE_INDEX, MISMATCHED, Batch, Row
from tasks.runtime.objectives.objective import Objective
from tasks.runtime.process.ranks import Processes

Rows = RowDataset | Subset[Row]
# Values of columns without items.
_NOTHING = {"labels": IGNORE_INDEX, "sides": 0}


class Interrupted(Exception):
    """The evaluation was left at the request of its caller."""


class ValidationMeans(NamedTuple):
    """Mean loss and metrics over all validation rows, and over those of each source; {} where there is no item."""

    of_all: dict[str, float]
    by_source: tuple[dict[str, float], ...]


def validation_means(
    model: nn.Module,
    objective: Objective,
    sources: Sequence[Rows],
    processes: Processes,
    *,
    micro_batch_size: int,
    max_batches: int | None,
    collate: Callable[[list[Row]], Batch],
    before_batch: Callable[[int, int], None] = lambda number, count: None,
) -> ValidationMeans:
    """Mean loss and metrics of the objective over the validation rows of each source, and of all. A collective.

    Every item (target token, or pair of answers) weighs the same, as in
    `cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.ne(-100).sum()` over all rows at
    once. Micro-batches are those of a single process, divided over the data-parallel ranks. Sums stay on the device in
    fp64 until one reduction at the end.

    model: in evaluation mode, on the device of `processes`.
    max_batches: of each source, on all ranks together.
    before_batch: called with the number of a pass over a source and their number; what it raises ends the evaluation.
    """
    of_all: dict[str, float] = {}
    items, by_source = 0.0, []
    collate = shard_collate(collate, processes)
    for rows in sources:
        sums, count = _sums(model, objective, rows, processes, micro_batch_size, max_batches, collate, before_batch)
        by_source.append({name: value / count for name, value in sums.items()} if count else {})
        of_all = {name: of_all.get(name, 0.0) + value for name, value in sums.items()} if count else of_all
        items += count
    return ValidationMeans({name: value / items for name, value in of_all.items()}, tuple(by_source))


@torch.no_grad()
def _sums(
    model: nn.Module,
    objective: Objective,
    rows: Rows,
    processes: Processes,
    micro_batch_size: int,
    max_batches: int | None,
    collate: Callable[[list[Row]], Batch],
    before_batch: Callable[[int, int], None],
) -> tuple[dict[str, float], float]:
    """Sums of the loss and the metrics over the items of `rows`, and the number of these."""
    batches = -(-len(rows) // micro_batch_size)
    batches = batches if max_batches is None else min(batches, max_batches)
    if not batches:
        return {}, 0.0
    ones = torch.ones((), device=processes.device)
    sums: Tensor | None = None
    names: list[str] = []
    items = 0
    # All ranks make the same number of passes, because sharded weights are gathered in each. A rank without a batch of
    # its own repeats the last one, which it does not count.
    passes = -(-batches // processes.dp_size)

    def read() -> Iterator[Batch]:
        for number in range(passes):
            before_batch(number, passes)
            index = number * processes.dp_size + processes.dp_rank
            found = _batch_of_rows(rows, min(index, batches - 1) * micro_batch_size, micro_batch_size)
            yield collate(found if index < batches else [_without_items(row) for row in found])

    objective.before_step(model, read(), processes)
    for batch in read():
        count = int(objective.count(batch))
        batch = {name: tensor.to(processes.device, non_blocking=True) for name, tensor in batch.items()}
        # Divided by one, the loss is a sum.
        share = objective.micro_batch_loss(model, batch, ones)
        values = {"loss": share.loss, **share.metrics}
        names = list(values)
        here = torch.stack([value.double() for value in values.values()])
        sums = torch.zeros_like(here) if sums is None else sums
        if count:
            sums += here
            items += count
    assert sums is not None
    total = torch.cat([sums, sums.new_tensor([items])])
    if processes.world_size > 1:
        dist.all_reduce(total)
        # Ranks of a tensor-parallel group have computed the same rows.
        total /= processes.tp_size
    *of_all, counted = total.tolist()
    return dict(zip(names, of_all, strict=True)), counted


def _batch_of_rows(rows: Rows, first: int, size: int) -> list[Row]:
    """`size` rows from `first` on. Behind the last row follow copies of it without items, so that every batch has the
    shape for which kernels and graphs were compiled.
    """
    found = [rows[index] for index in range(first, min(first + size, len(rows)))]
    return [*found, *[_without_items(found[-1])] * (size - len(found))]


def _without_items(row: Row) -> Row:
    """A copy of a row that adds nothing to any loss."""
    nothing = {f"{prefix}{name}": value for prefix in ("", MISMATCHED) for name, value in _NOTHING.items()}
    return row | {name: torch.full_like(row[name], value) for name, value in nothing.items() if name in row}
