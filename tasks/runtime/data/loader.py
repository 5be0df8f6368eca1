"""Data loader of the training split: the rows of a step are a pure function of the seed and the step.

Each epoch has all rows in a new order, and epochs follow each other without a gap: no row is dropped, and every
step has the same number of rows. The rows of a step are a contiguous range of that stream. It is divided into
micro-batches and these into data-parallel shards, so that a step has the same rows for any number of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Grpo, generates
from tasks.runtime.data.context_shards import shard_collate
from tasks.runtime.data.dataset import Batch, PreparedData, Row
from tasks.runtime.data.mixture import RowOrder
from tasks.runtime.data.prompts import AnswerRows
from tasks.runtime.data.row_order import ALL_SEED_BITS, row_order
from tasks.runtime.process.cpus import available_cpus
from tasks.runtime.process.ranks import Processes

_MAX_WORKERS = 8
# The order of answers: their numbers.
_NUMBERS = range(1 << 62)

DataSkip = tuple[int, int]
"""(step, n): after this step, the data of the next n steps is skipped. Steps that read the same rows are not split."""


def data_step(done: int, data_skips: Sequence[DataSkip]) -> int:
    """Position, in steps, of the data for the step after `done`: the steps before it plus the skipped ones.

    >>> [data_step(done, [(2, 3)]) for done in range(4)]
    [0, 1, 5, 6]
    """
    return done + sum(steps for step, steps in data_skips if step <= done)


def spans_read(done: int, rows: int, data_skips: Sequence[DataSkip] = ()) -> list[tuple[int, int]]:
    """Positions of the rows that a run has read after `done` steps of `rows` rows, as (first, last + 1).

    >>> spans_read(4, 8, [(2, 3)])
    [(0, 16), (40, 56)]
    """
    cuts = sorted({0, done, *(step for step, _ in data_skips if step < done)})
    return [
        (data_step(first, data_skips) * rows, (data_step(first, data_skips) + last - first) * rows)
        for first, last in pairwise(cuts)
    ]


class MicroBatchSampler(Sampler[list[int]]):
    """Batch sampler of this rank's micro-batches from step `start` + 1 to step `stop`."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        order: RowOrder,
        *,
        start: int,
        stop: int,
        data_skips: Sequence[DataSkip] = (),
    ) -> None:
        self._order, self._steps_of_rows = order, spec.steps_of_rows
        self._size, self._per_step = spec.training.micro_batch_size, spec.training.gradient_accumulation_steps
        self._processes, self._start, self._stop, self._data_skips = processes, start, stop, data_skips

    def __len__(self) -> int:
        return (self._stop - self._start) * self._per_step

    def __iter__(self) -> Iterator[list[int]]:
        for done in range(self._start, self._stop):
            first = data_step(done, self._data_skips) // self._steps_of_rows * self._per_step
            for number in range(first, first + self._per_step):
                begin = (number * self._processes.dp_size + self._processes.dp_rank) * self._size
                yield [self._order[position] for position in range(begin, begin + self._size)]


class TimedDataLoader(DataLoader[dict[str, torch.Tensor]]):
    """DataLoader that calls `on_wait` with the seconds that training waited for each micro-batch."""

    on_wait: Callable[[float], None] | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:  # type: ignore[override]
        micro_batches = super().__iter__()
        while True:
            asked = time.monotonic()
            batch = next(micro_batches, None)
            if batch is None:
                return
            if self.on_wait is not None:
                self.on_wait(time.monotonic() - asked)
            yield batch


def training_loader(
    spec: RunSpec,
    data: PreparedData,
    processes: Processes,
    *,
    collate: Callable[[list[Row]], Batch],
    start: int,
    stop: int,
    data_skips: Sequence[DataSkip] = (),
    seed_bits: int = ALL_SEED_BITS,
    workers: int | None = None,
) -> TimedDataLoader:
    """Loader of this rank's micro-batches in order, `training.gradient_accumulation_steps` per step.

    seed_bits: `seed_bits_of` the run; by default those of a new one.
    workers: processes that make batches ahead; by default some if images or audio are decoded for a GPU, else none.
    """
    rows = data.train
    if workers is None:
        # A CPU that trains has none to spare.
        decodes_media = data.manifest.has_media and processes.device.type == "cuda"
        workers = min(_MAX_WORKERS, available_cpus() // spec.topology.nproc_per_node - 1) if decodes_media else 0
    order = row_order(data.manifest, rows, spec.data, spec.seed, seed_bits=seed_bits)
    dataset: Dataset[Row] = rows
    if isinstance(spec.objective, Grpo):
        # Several rows of a step are one prompt.
        dataset, order = AnswerRows(rows, order, spec.objective.group_size), _NUMBERS
    elif generates(spec.objective):
        # Numbers of rows decide what the model writes for them.
        dataset, order = AnswerRows(rows, order, 1), _NUMBERS
    sampler = MicroBatchSampler(spec, processes, order, start=start, stop=stop, data_skips=data_skips)
    return TimedDataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=shard_collate(collate, processes),
        pin_memory=torch.cuda.is_available(),
        # DataLoader draws a seed at each iteration. With the default generator, which dropout uses, a resumed run would
        # draw one number more than an undisturbed run.
        generator=torch.Generator(),
        num_workers=max(0, workers),
        # Forked, they have the processor without loading it again. They touch no GPU.
        multiprocessing_context="fork" if workers > 0 else None,
    )
