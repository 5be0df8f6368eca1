"""Which rows a step reads: a pure function of the seed and the step.

The rows of an epoch are shuffled anew, and the epochs follow each other without a gap: nothing is dropped, and every
step has the same number of rows. A step's rows are one stretch of that stream, cut into micro-batches and those into
the processes' shares, so that the same rows make a step however they are spread over processes and micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Sampler

from strata_platform.spec import RunSpec
from tasks.runtime.data.context_shards import shard_collate
from tasks.runtime.data.dataset import Batch, PreparedData, Row
from tasks.runtime.process.ranks import Processes

DataSkip = tuple[int, int]
"""A step, and of how many steps the data is passed over after it."""


def data_step(done: int, data_skips: Sequence[DataSkip]) -> int:
    """Steps whose data comes before that of the step after `done`: a pure function, the same after every restart.

    >>> [data_step(done, [(2, 3)]) for done in range(4)]
    [0, 1, 5, 6]
    """
    return done + sum(steps for step, steps in data_skips if step <= done)


class ShuffledRows:
    """Row at each position of the endless stream of shuffled epochs over `rows` rows."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 24) + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self._rows, generator=generator)
        return int(self._permutation[index])


class MicroBatchSampler(Sampler[list[int]]):
    """Rows of this process's micro-batches, from the one after step `start` to the last of step `stop`."""

    def __init__(
        self,
        spec: RunSpec,
        processes: Processes,
        rows: int,
        *,
        start: int,
        stop: int,
        data_skips: Sequence[DataSkip] = (),
    ) -> None:
        self._order = ShuffledRows(rows, spec.seed)
        self._size, self._per_step = spec.training.micro_batch_size, spec.training.gradient_accumulation_steps
        self._processes, self._start, self._stop, self._data_skips = processes, start, stop, data_skips

    def __len__(self) -> int:
        return (self._stop - self._start) * self._per_step

    def __iter__(self) -> Iterator[list[int]]:
        for done in range(self._start, self._stop):
            first = data_step(done, self._data_skips) * self._per_step
            for number in range(first, first + self._per_step):
                begin = (number * self._processes.dp_size + self._processes.dp_rank) * self._size
                yield [self._order[position] for position in range(begin, begin + self._size)]


class TimedDataLoader(DataLoader[dict[str, torch.Tensor]]):
    """Micro-batches in order; calls `on_wait` with the seconds that each took to come."""

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
) -> TimedDataLoader:
    """This process's micro-batches in order, `training.gradient_accumulation_steps` for each step."""
    rows = data.train
    return TimedDataLoader(
        rows,
        batch_sampler=MicroBatchSampler(spec, processes, len(rows), start=start, stop=stop, data_skips=data_skips),
        collate_fn=shard_collate(collate, processes),
        pin_memory=torch.cuda.is_available(),
        # Going through it draws a number, which must not come from the generator that dropout draws from: a run that
        # continues would draw it once more.
        generator=torch.Generator(),
    )
