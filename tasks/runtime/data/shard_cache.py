"""Shards of an object store on the disk of this machine: downloaded when they are read, and bounded in bytes.

All processes of a machine share the folder, and download one after the other, so that the bound holds for all of them
together. The shards that were not opened for the longest time make room. Who has opened a shard keeps it: a mapped file
exists until it is closed, whether it has a name or not.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from strata_platform.file_io import acquire_lock
from tasks.runtime.data.prepared_manifest import Shard
from tasks.runtime.data.shard_store import ShardStore

log = logging.getLogger(__name__)

FOLDER = "STRATA_DATA_CACHE"
"""Environment variable: the folder of the cache; by default one of this user in the folder for temporary files."""
_SUFFIX = ".safetensors"
_SLOW = 10.0


def cache_folder(name: str) -> Path:
    """The folder for the shards of prepared data of that name. Raises ValueError when it belongs to another user."""
    given = os.environ.get(FOLDER)
    root = Path(given) if given else Path(tempfile.gettempdir()) / f"strata-data-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise ValueError(f"{root} belongs to another user; set {FOLDER} to a folder of your own")
    folder = root / name
    folder.mkdir(exist_ok=True)
    return folder


class ShardCache:
    """Files of a store, with at most `limit` bytes of them on disk, and at least one.

    prefix: of their names in the folder. Caches that share a folder share its limit.
    """

    def __init__(self, store: ShardStore, folder: Path, limit: int, prefix: str = "") -> None:
        self.limit = limit
        self._store, self._folder, self._prefix = store, folder, prefix
        self._wanted: queue.SimpleQueue[Shard] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def path(self, shard: Shard) -> Path:
        """The file of a shard, after a download if it is not there. Raises ValueError when the store lacks it."""
        path = self._folder / f"{self._prefix}{shard.file.replace('/', '-')}"
        if not self._touch(path):
            with open(self._folder / ".lock", "w", encoding="utf-8") as lock:
                acquire_lock(lock)
                # Another process may have fetched it meanwhile.
                if not self._touch(path):
                    self._make_room(shard.bytes)
                    self._download(shard, path)
        return path

    def prefetch(self, shards: Iterable[Shard]) -> None:
        """Download shards in the background, in this order."""
        for shard in shards:
            self._wanted.put(shard)
        if self._thread is None:
            # It holds nothing that has to be closed.
            self._thread = threading.Thread(target=self._work, name="prefetch of shards", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            shard = self._wanted.get()
            try:
                self.path(shard)
            # Whoever needs the shard tries again and raises it.
            except Exception as error:
                log.warning("%s cannot be fetched yet: %s", shard.file, error)

    def _touch(self, path: Path) -> bool:
        """Note that a file is read now; False without it."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _download(self, shard: Shard, path: Path) -> None:
        temporary = self._folder / f".{uuid4().hex}"
        started = time.monotonic()
        try:
            self._store.get(shard.file, temporary)
            if temporary.stat().st_size != shard.bytes:
                raise FileNotFoundError
            temporary.rename(path)
        except FileNotFoundError as error:
            raise ValueError(
                f"{self._store.place}/{shard.file} is missing or truncated; delete {self._store.place} and prepare the "
                "data again"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        if (seconds := time.monotonic() - started) > _SLOW:
            log.info("fetched %s, %.0f MB, in %.0f s", shard.file, shard.bytes / 1e6, seconds)

    def _make_room(self, needed: int) -> None:
        """Delete the files that were not read for the longest time. The caller holds the lock."""
        found = [(path.stat(), path) for path in self._folder.glob(f"*{_SUFFIX}")]
        total = needed + sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
            if total <= self.limit:
                return
            path.unlink()
            total -= status.st_size
