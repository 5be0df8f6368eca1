"""The order in which rows are read: a pure function of the seed and the position, epoch after epoch without a gap.

`data.shuffle: global` is a permutation of all rows in each epoch. `window` takes the shards in the order in which they
were prepared, which is random already, in later epochs in another random order, and permutes the rows of a few shards
at a time. So a run reads only these at a time, and can begin before the others are prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.dataset import RowDataset
from tasks.runtime.data.mixture import MixedRows, RowOrder, draw_of
from tasks.runtime.data.prepared_manifest import Manifest
from tasks.runtime.data.shards import Shards

SEED_BITS = "seed_bits"
"""Key, in a checkpoint's metadata, of the bits of the seed that its run's order of rows depends on."""

FIRST_SEED_BITS = 8
"""How many those were before checkpoints had `SEED_BITS`: of the seed of a source, 8 of 64."""

ALL_SEED_BITS = 64
"""How many they are in a new run."""


class ShuffledRows:
    """Endless stream of row indices: epoch after epoch, each a new permutation of `rows` rows."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, _permutation(self._rows, self._seed, epoch)
        return int(self._permutation[index])


class WindowShuffledRows:
    """Endless stream of row indices: in each epoch all shards in a random order, `window` of them shuffled together."""

    def __init__(self, shards: Shards, window: int, seed: int) -> None:
        self._shards, self._window, self._seed = shards, window, seed
        self._begin, self._rows = 0, torch.empty(0, dtype=torch.int64)
        # Rows of the known shards, and the index of the first row of each.
        self._sizes: list[int] = []
        self._offsets = [0]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position - self._begin < self._rows.numel():
            self._begin, self._rows = self._find(position)
        return int(self._rows[position - self._begin])

    def _find(self, position: int) -> tuple[int, torch.Tensor]:
        """The position at which the window with `position` begins, and its row indices in order."""
        # The first epoch has the shards in the order of their preparation, as far as they are needed.
        begin = 0
        for number, shards in enumerate(self._first_epoch()):
            size = sum(self._sizes[shard] for shard in shards)
            if position < begin + size:
                self._shards.prefetch(range(shards[0], shards[-1] + 1 + self._window))
                return begin, self._shuffled(shards, epoch=0, number=number)
            begin += size
        rows = self._offsets[-1]
        epoch = position // rows
        begin = epoch * rows
        order = _permutation(len(self._sizes), self._seed, epoch).tolist()
        for number in range(-(-len(order) // self._window)):
            shards = order[number * self._window : (number + 1) * self._window]
            size = sum(self._sizes[shard] for shard in shards)
            if position < begin + size:
                self._shards.prefetch(order[number * self._window : (number + 2) * self._window])
                return begin, self._shuffled(shards, epoch=epoch, number=number)
            begin += size
        raise AssertionError("every position is in a window")

    def _first_epoch(self) -> Iterator[list[int]]:
        first = 0
        while shards := [shard for shard in range(first, first + self._window) if self._is_there(shard)]:
            yield shards
            first += self._window

    def _is_there(self, shard: int) -> bool:
        """Whether there is such a shard; its rows are known then."""
        if shard < len(self._sizes):
            return True
        rows = self._shards.rows_of(shard)
        if rows is None:
            return False
        self._sizes.append(rows)
        self._offsets.append(self._offsets[-1] + rows)
        return True

    def _shuffled(self, shards: list[int], *, epoch: int, number: int) -> torch.Tensor:
        found = torch.cat([torch.arange(self._offsets[shard], self._offsets[shard + 1]) for shard in shards])
        # Epochs and windows have seeds of their own, apart from those of whole epochs.
        return found[_permutation(found.numel(), self._seed, (epoch << 20) + number + (1 << 44))]


def seed_bits_of(metadata: Mapping[str, Any]) -> int:
    """The bits of the seed that a run's order of rows depends on, by its checkpoint's metadata; {} for a new run."""
    bits: int = metadata.get(SEED_BITS, FIRST_SEED_BITS) if metadata else ALL_SEED_BITS
    return bits


def row_order(
    manifest: Manifest, rows: RowDataset, data: Data, seed: int, *, seed_bits: int = ALL_SEED_BITS
) -> RowOrder:
    """The order in which training reads the rows of the training split. seed_bits: `seed_bits_of` the run."""
    first, shards = zip(*rows.by_source(manifest), strict=True)
    orders: Sequence[RowOrder]
    if data.shuffle == "window":
        seeds = (_seed(seed, number, seed_bits) for number in range(len(shards)))
        orders = [WindowShuffledRows(one, data.window, own) for one, own in zip(shards, seeds, strict=True)]
    else:
        orders = shuffled_sources(manifest, seed, seed_bits=seed_bits)
    return orders[0] if len(orders) == 1 else MixedRows(draw_of(manifest, data.weights), orders, first)


def shuffled_sources(manifest: Manifest, seed: int, *, seed_bits: int = ALL_SEED_BITS) -> list[ShuffledRows]:
    """The stream of row indices of each source that is trained on, with `data.shuffle: global`."""
    seeds = (_seed(seed, number, seed_bits) for number in range(len(manifest.trained)))
    return [ShuffledRows(source.train.rows, own) for source, own in zip(manifest.trained, seeds, strict=True)]


def _seed(seed: int, number: int, bits: int) -> int:
    """A seed of its own for each source, beyond those that a spec can have; its low `bits`."""
    return (seed + (number << 32)) % (1 << bits)


def _permutation(count: int, seed: int, number: int) -> torch.Tensor:
    combined = (seed << 24) + number
    if seed >> FIRST_SEED_BITS:
        # PyTorch's generator on the CPU takes the low 32 bits of a seed, so a larger one is hashed to as many.
        combined = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
    return torch.randperm(count, generator=torch.Generator().manual_seed(combined))
