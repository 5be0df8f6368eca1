"""Shards of a store on disk: fetched once, within a bound, and what is mapped stays readable."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.runtime.data.prepared_manifest import Shard, Split
from tasks.runtime.data.shard_cache import ShardCache, cache_folder
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.data.shards import Shards

SIZE = 1000


class Counting(ShardStore):
    """A store that notes what is fetched."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.fetched: list[str] = []

    def get(self, name: str, path: Path) -> None:
        self.fetched.append(name)
        super().get(name, path)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    (tmp_path / "store").mkdir()
    for number in range(6):
        (tmp_path / "store" / f"{number}.safetensors").write_bytes(bytes([number]) * SIZE)
    return Counting(f"file://{tmp_path}/store")


class Evicting(ShardCache):
    """A cache whose file is gone once after `path` has returned, as where another process makes room."""

    evicted = 0

    def path(self, shard: Shard) -> Path:
        found = super().path(shard)
        if not self.evicted:
            self.evicted += 1
            found.unlink()
        return found


def test_a_shard_that_is_evicted_before_it_is_opened_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    file = tmp_path / "store" / "0.safetensors"
    save_file({"input_ids": torch.arange(3)}, file)
    store = Counting(f"file://{tmp_path}/store")
    one = Shard(file.name, 1, file.stat().st_size, "")
    cache = Evicting(store, tmp_path, 10 * SIZE)
    shards = Shards(tmp_path, Split(1, 1, 3, 3, 1, (one,)), cache)
    assert shards.tensors(0)["input_ids"].tolist() == [0, 1, 2]
    assert (cache.evicted, store.fetched) == (1, [file.name] * 2)


def shard(number: int, size: int = SIZE) -> Shard:
    return Shard(f"{number}.safetensors", 1, size, "")


def cache_of(store: ShardStore, tmp_path: Path, limit: int) -> ShardCache:
    (tmp_path / "cache").mkdir(exist_ok=True)
    return ShardCache(store, tmp_path / "cache", limit)


def held(tmp_path: Path) -> set[str]:
    return {path.name[0] for path in (tmp_path / "cache").glob("*.safetensors")}


def test_the_shards_read_longest_ago_make_room(store: Counting, tmp_path: Path) -> None:
    cache = cache_of(store, tmp_path, 3 * SIZE)
    for number in (0, 1, 2, 0, 3):
        path = cache.path(shard(number))
        assert path.read_bytes() == bytes([number]) * SIZE
        # Files of one tick of the clock have no order.
        os.utime(path, ns=(0, len(store.fetched) * 10**9 + number))
        assert sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()) <= 3 * SIZE
    assert [name[0] for name in store.fetched] == ["0", "1", "2", "3"]
    assert held(tmp_path) == {"0", "2", "3"} or held(tmp_path) == {"1", "2", "3"}
    assert cache_of(store, tmp_path, 1).path(shard(5)).exists() and held(tmp_path) == {"5"}


def test_a_shard_is_fetched_once_by_all_who_need_it(store: Counting, tmp_path: Path) -> None:
    caches = [cache_of(store, tmp_path, 10 * SIZE) for _ in range(8)]
    threads = [threading.Thread(target=cache.path, args=(shard(1),)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.fetched == ["1.safetensors"]


def test_what_is_read_soon_is_fetched_in_the_background(store: Counting, tmp_path: Path) -> None:
    cache = cache_of(store, tmp_path, 10 * SIZE)
    fetched = threading.Event()
    get = store.get

    def noted(name: str, path: Path) -> None:
        get(name, path)
        if name.startswith("4"):
            fetched.set()

    store.get = noted  # type: ignore[method-assign]
    cache.prefetch([shard(9), shard(2), shard(4)])
    assert fetched.wait(30)
    assert cache.path(shard(4)).exists() and store.fetched == ["9.safetensors", "2.safetensors", "4.safetensors"]


def test_a_shard_that_the_store_lacks_or_cut_is_told(store: Counting, tmp_path: Path) -> None:
    cache = cache_of(store, tmp_path, 10 * SIZE)
    for wrong in (shard(9), shard(1, SIZE + 1)):
        with pytest.raises(ValueError, match=rf"store/{wrong.file} is missing or truncated; delete "):
            cache.path(wrong)
    assert held(tmp_path) == set()


def test_the_folder_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_DATA_CACHE", str(tmp_path / "own"))
    assert cache_folder("abc") == tmp_path / "own" / "abc"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user; set STRATA_DATA_CACHE"):
        cache_folder("abc")
