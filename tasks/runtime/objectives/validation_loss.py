"""The objective's loss and metrics on the validation split: means over all of its items, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.runtime.data import RowDataset
from tasks.runtime.data.context_shards import shard_collate
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row
from tasks.runtime.objectives.objective import Objective
from tasks.runtime.process.ranks import Processes


class Interrupted(Exception):
    """The evaluation was left at the request of its caller."""


@torch.no_grad()
def validation_means(
    model: nn.Module,
    objective: Objective,
    rows: RowDataset,
    processes: Processes,
    *,
    micro_batch_size: int,
    max_batches: int | None,
    collate: Callable[[list[Row]], Batch],
    before_batch: Callable[[int, int], None] = lambda number, count: None,
) -> dict[str, float]:
    """Mean loss and metrics of the objective over `rows`; {} if they have no item. A collective.

    Every item (target token, or pair of answers) weighs the same, as in
    `cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.ne(-100).sum()` over all rows at
    once. Micro-batches are those of a single process, divided over the data-parallel ranks. Sums stay on the device in
    fp64 until one reduction at the end.

    model: in evaluation mode, on the device of `processes`.
    max_batches: of all ranks together.
    before_batch: called with the number of a pass and the number of passes; what it raises ends the evaluation.
    """
    batches = -(-len(rows) // micro_batch_size)
    batches = batches if max_batches is None else min(batches, max_batches)
    if not batches:
        return {}
    collate = shard_collate(collate, processes)
    ones = torch.ones((), device=processes.device)
    sums: Tensor | None = None
    names: list[str] = []
    items = 0
    # All ranks make the same number of passes, because sharded weights are gathered in each. A rank without a batch of
    # its own repeats the last one, which it does not count.
    passes = -(-batches // processes.dp_size)
    for number in range(passes):
        before_batch(number, passes)
        index = number * processes.dp_size + processes.dp_rank
        batch = collate(_batch_of_rows(rows, min(index, batches - 1) * micro_batch_size, micro_batch_size))
        count = int(objective.count(batch)) if index < batches else 0
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
    return {name: value / counted for name, value in zip(names, of_all, strict=True)} if counted else {}


def _batch_of_rows(rows: RowDataset, first: int, size: int) -> list[Row]:
    """`size` rows from `first` on. Behind the last row follow copies of it without items, so that every batch has the
    shape for which kernels and graphs were compiled.
    """
    found = [rows[index] for index in range(first, min(first + size, len(rows)))]
    filler = {**found[-1], "labels": torch.full_like(found[-1]["labels"], IGNORE_INDEX)}
    if "sides" in filler:
        filler["sides"] = torch.zeros_like(filler["sides"])
    return [*found, *[filler] * (size - len(found))]
