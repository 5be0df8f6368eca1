"""The order of rows: each row once in an epoch, and with windows those of a few shards at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.prepared_manifest import EMPTY, Shard
from tasks.runtime.data.row_order import ALL_SEED_BITS, FIRST_SEED_BITS, ShuffledRows, WindowShuffledRows, row_order
from tasks.runtime.data.shards import Shards

SIZES = (5, 3, 8, 1, 6, 4, 7)
ROWS = sum(SIZES)


class Looked(Shards):
    """Shards without files, which note how far they were looked at."""

    def __init__(self) -> None:
        found = tuple(Shard(f"{number}", rows, 1, "") for number, rows in enumerate(SIZES))
        super().__init__(Path(), replace(EMPTY, shards=found))
        self.last = -1

    def rows_of(self, number: int) -> int | None:
        self.last = max(self.last, number)
        return super().rows_of(number)


def shard_of(row: int) -> int:
    return next(number for number in range(len(SIZES)) if row < sum(SIZES[: number + 1]))


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_every_epoch_has_every_row_once_in_another_order(window: int) -> None:
    order = WindowShuffledRows(Looked(), window, seed=3)
    epochs = [[order[epoch * ROWS + index] for index in range(ROWS)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [WindowShuffledRows(Looked(), window, seed=4)[index] for index in range(ROWS)] not in epochs


def test_a_window_has_the_rows_of_its_shards_alone() -> None:
    order = WindowShuffledRows(Looked(), 3, seed=0)
    first = [order[position] for position in range(16)]
    assert sorted(first) == list(range(16)) != first
    assert {shard_of(order[position]) for position in range(16, 27)} == {3, 4, 5}
    later = [shard_of(order[ROWS + position]) for position in range(ROWS)]
    changes = [len(set(later[: end + 1])) for end in range(ROWS)]
    # Three shards, then three others: never a fourth before all rows of the first three.
    assert len(set(later[: changes.index(4)])) == 3
    assert changes.index(4) == sum(SIZES[shard] for shard in set(later[: changes.index(4)]))


def test_an_order_may_be_read_from_anywhere() -> None:
    whole = [WindowShuffledRows(Looked(), 2, seed=1)[position] for position in range(3 * ROWS)]
    for start in (0, 1, ROWS - 1, ROWS, 2 * ROWS + 7):
        order = WindowShuffledRows(Looked(), 2, seed=1)
        assert [order[position] for position in range(start, 3 * ROWS)] == whole[start:]
    order = WindowShuffledRows(Looked(), 2, seed=1)
    assert [order[position] for position in reversed(range(3 * ROWS))] == whole[::-1]


def test_no_more_shards_are_needed_than_a_window_has() -> None:
    shards = Looked()
    order = WindowShuffledRows(shards, 2, seed=1)
    assert order[7] < 8 and shards.last == 1
    assert 8 <= order[8] < 17 and shards.last == 3


def in_32_bits(count: int, seed: int) -> list[int]:
    """PyTorch's permutation: its generator on the CPU takes the low 32 bits of a seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed % (1 << 32))).tolist()


SEEDS = (1, 257, (1 << 16) + 1, (1 << 24) + 1, (1 << 31) + 1)


@pytest.mark.parametrize("window", [None, 2])
def test_every_bit_of_the_seed_counts(window: int | None) -> None:
    orders = [
        ShuffledRows(ROWS, seed) if window is None else WindowShuffledRows(Looked(), window, seed) for seed in SEEDS
    ]
    epochs = {tuple(order[epoch * ROWS + index] for index in range(ROWS)) for order in orders for epoch in range(2)}
    assert len(epochs) == 2 * len(SEEDS)


@pytest.mark.parametrize("seed", [0, 1, 255])
def test_a_seed_of_8_bits_has_the_order_of_earlier_versions(seed: int) -> None:
    order, windows = ShuffledRows(ROWS, seed), WindowShuffledRows(Looked(), 100, seed)
    for epoch in (0, 1, 17):
        first = epoch * ROWS
        assert [order[first + index] for index in range(ROWS)] == in_32_bits(ROWS, (seed << 24) + epoch)
        shards = in_32_bits(len(SIZES), (seed << 24) + epoch) if epoch else range(len(SIZES))
        rows = [row for shard in shards for row in range(sum(SIZES[:shard]), sum(SIZES[: shard + 1]))]
        found = [rows[index] for index in in_32_bits(ROWS, (seed << 24) + (epoch << 20))]
        assert [windows[first + index] for index in range(ROWS)] == found


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    """Rows of parallel texts, such as translations, would otherwise meet in one batch."""
    source = SimpleNamespace(train=SimpleNamespace(rows=ROWS))
    manifest = SimpleNamespace(trained=[source, source])
    rows = SimpleNamespace(by_source=lambda manifest: [(0, None), (ROWS, None)])

    def places(seed_bits: int) -> tuple[list[int], list[int]]:
        order = row_order(manifest, rows, Data(), 257, seed_bits=seed_bits)  # type: ignore[arg-type]
        found = [order[position] for position in range(2 * ROWS)]
        return [row for row in found if row < ROWS], [row - ROWS for row in found if row >= ROWS]

    first, second = places(ALL_SEED_BITS)
    assert sorted(first) == sorted(second) == list(range(ROWS)) and first != second
    # A run that an earlier version has begun.
    assert places(FIRST_SEED_BITS) == (in_32_bits(ROWS, 257 << 24),) * 2
