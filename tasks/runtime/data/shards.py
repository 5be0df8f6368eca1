"""The shards of a split: how many rows each has, and its tensors, mapped from files and read when they are used.

The shards of data that is still being prepared are known one after the other, in the order of their preparation.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from tasks.runtime.data.preparation.part_records import read_record
from tasks.runtime.data.prepared_manifest import Shard, Split
from tasks.runtime.data.shard_cache import ShardCache
from tasks.runtime.data.shard_store import ShardStore

log = logging.getLogger(__name__)

# Bytes of the files that are mapped at a time. Their pages are the system's to give back, but count as this process's.
_MAPPED_BYTES = 4 << 30
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_REPORTS = 10.0


class Shards:
    """The shards of a prepared split, in a folder, or in an object store behind a cache."""

    def __init__(
        self, folder: Path, split: Split, cache: ShardCache | None = None, *, mapped_bytes: int = _MAPPED_BYTES
    ) -> None:
        self._folder, self._cache, self._mapped_bytes = folder, cache, mapped_bytes
        self._known = list(split.shards)
        self._open: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    @property
    def known_rows(self) -> int:
        """Rows of the shards that are known."""
        return sum(shard.rows for shard in self._known)

    def rows_of(self, number: int) -> int | None:
        """The rows of a shard, after waiting until it is prepared; None after the last one."""
        return self._known[number].rows if number < len(self._known) else None

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The tensors of a shard."""
        if number not in self._open:
            self._open[number] = self._map(self._known[number])
            while len(self._open) > 1 and self._bytes_open() > self._mapped_bytes:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Fetch shards in the background that are read soon, as far as they are prepared."""
        if self._cache is not None:
            self._cache.prefetch([self._known[number] for number in numbers if number < len(self._known)])

    def part(self, split: Split) -> Shards:
        """Shards of the same place: those of a split that is a part of this one."""
        return Shards(self._folder, split, self._cache)

    def __getstate__(self) -> dict[str, object]:
        # Each worker process of a DataLoader maps the files itself.
        return {**self.__dict__, "_open": OrderedDict()}

    def _map(self, shard: Shard) -> dict[str, Tensor]:
        if self._cache is None:
            return _tensors_of(self._folder / shard.file)
        while True:
            try:
                return _tensors_of(self._cache.path(shard))
            except FileNotFoundError:
                # Another thread or process made room by it before it was opened. A shard that the store lacks is a
                # ValueError.
                continue

    def _bytes_open(self) -> int:
        return sum(self._known[number].bytes for number in self._open)


def _tensors_of(path: Path) -> dict[str, Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class GrowingShards(Shards):
    """The training shards of data that is still being prepared.

    require_alive: raises an error when the preparation has failed.
    """

    def __init__(
        self, store: ShardStore, parts: int, cache: ShardCache | None, require_alive: Callable[[], None]
    ) -> None:
        super().__init__(store.folder or Path(), Split(0, 0, 0, 0, 0, ()), cache)
        self._store, self._parts, self._require_alive = store, parts, require_alive
        self._read = 0

    @property
    def known_rows(self) -> int:
        """Rows of the shards that are known, at least one."""
        self.rows_of(0)
        return super().known_rows

    def rows_of(self, number: int) -> int | None:
        """The rows of a shard, after waiting until it is prepared; None after the last one."""
        while number >= len(self._known) and self._read < self._parts:
            self._known += self._next_part()
        return super().rows_of(number)

    def _next_part(self) -> tuple[Shard, ...]:
        started = reported = time.monotonic()
        waited = False
        while (record := read_record(self._store, self._read)) is None:
            self._require_alive()
            now = time.monotonic()
            if not waited or now - reported > _SECONDS_BETWEEN_REPORTS:
                waited, reported = True, now
                log.info("waiting for part %d of %d to be prepared, %.0f s", self._read + 1, self._parts, now - started)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._read += 1
        return record.train.shards
