"""Fills Triton's cache directory on demand, from container images and a store.

    filler = CacheFiller(directory, images=[Path("/opt/kernels/sm_90")], store=store)
    with filler.installed():
        report = warmup(plan)
    filler.push()

Triton looks up each kernel, launcher and driver helper by its key before it compiles. The filler copies a missing entry
into the cache directory from the first image that has it, or from the store. Triton compiles the rest, and `push`
uploads that to the store. The filler checks every entry before Triton reads it. If a directory or the store fails, the
filler adds the error to `problems` and Triton compiles.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triton import knobs
from triton.runtime.cache import FileCacheManager

from . import triton_cache
from .compile_counter import compile_listener
from .kernel_description import KernelDescription, describe_kernel
from .store import Store
from .time_budget import CircuitBreaker

Origin = Literal["cache", "image", "store", "compiled"]
ORIGINS: tuple[Origin, ...] = ("cache", "image", "store", "compiled")

_PUSHERS = 16


@dataclass
class CacheFiller:
    """Fills the cache directory of one process.

    directory: Triton's cache directory, the value of TRITON_CACHE_DIR.
    images: read-only cache directories, such as kernels baked into a container image.
    store: for entries that are in none of the directories.
    breaker: limits the time for the store, and skips it after a failure.
    """

    directory: Path
    images: Sequence[Path] = ()
    store: Store | None = None
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    unwritable: str | None = None
    """The error of a failed write to the directory; Triton will compile such entries again in other processes."""
    pushed: int = 0
    """Entries uploaded by `push`."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}
        self._origins: dict[str, Origin] = {}
        self._kernels: dict[str, KernelDescription] = {}
        self._image_seconds = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which Triton, in all threads of the process, looks up entries through this filler."""
        before, knobs.cache.manager_class = knobs.cache.manager_class, self._manager_class()
        try:
            with compile_listener(self._describe):
                yield
        finally:
            knobs.cache.manager_class = before

    @property
    def problems(self) -> list[str]:
        """Errors, for the log and the report."""
        return self.breaker.problems

    @property
    def kernels(self) -> list[KernelDescription]:
        """Descriptions of the kernels that Triton looked up."""
        return list(self._kernels.values())

    def counts(self) -> dict[Origin, int]:
        """The number of kernels by origin, without launchers and helpers."""
        found = Counter(self._origins.get(key, "compiled") for key in self._kernels)
        return {origin: found[origin] for origin in ORIGINS}

    def push(self) -> None:
        """Upload entries that Triton compiled to the store, and trim the store to its size limit."""
        if (store := self.store) is None:
            return
        compiled = [key for key, origin in self._origins.items() if origin == "compiled"]
        entries = [(key, files) for key in compiled if (files := self._load(self.directory, key)) is not None]
        with ThreadPoolExecutor(_PUSHERS) as pool:
            results = pool.map(lambda entry: self.breaker.call("push to", lambda: store.push(*entry)), entries)
            self.pushed = sum(result is True for result in results)
        self.breaker.call("refresh entries of", store.refresh_used)
        if self.pushed:
            self.breaker.call("trim", store.trim)
        self.breaker.problems += store.rejections()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: kernels by origin, seconds summed over threads, and errors.

        `unwritable` is present only if a write failed.
        """
        counts = self.counts()
        return {
            **({} if self.unwritable is None else {"unwritable": self.unwritable}),
            "directory": str(self.directory),
            **{f"{origin}_hits": counts[origin] for origin in ORIGINS if origin != "compiled"},
            "pushed": self.pushed,
            "image_seconds": self._image_seconds,
            "store_seconds": self.breaker.spent,
            "problems": self.problems,
        }

    def _manager_class(self) -> type[FileCacheManager]:
        filler = self

        class FillingCacheManager(FileCacheManager):  # type: ignore[misc]
            """Triton's cache manager, which fills the directory before it looks up an entry."""

            def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
                if not override and not dump:
                    filler._fetch(key)
                with filler._record_write_errors():
                    super().__init__(key, override, dump)

            def put(self, data: Any, filename: str, binary: bool = True) -> str:
                with filler._record_write_errors():
                    if not filename.endswith(triton_cache.UNGROUPED):
                        return str(super().put(data, filename, binary))
                    with filler._key_locks[self.key], triton_cache.locked_entry(filler.directory, self.key):
                        # Threads and processes build the same helper concurrently, and builds differ byte by byte. The
                        # first one stays; otherwise the digest could belong to another build than the file.
                        if not filler._has(self.key):
                            contents = data if isinstance(data, bytes) else str(data).encode()
                            triton_cache.write_digests(filler.directory, self.key, {filename: contents})
                            super().put(data, filename, binary)
                        return str(self._make_path(filename))

            def put_group(self, filename: str, group: dict[str, str]) -> str:
                with filler._record_write_errors():
                    files = {name: Path(path).read_bytes() for name, path in group.items()}
                    triton_cache.write_digests(filler.directory, self.key, files)
                    return str(super().put_group(filename, group))

        return FillingCacheManager

    @contextmanager
    def _record_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.unwritable = str(error)
            raise

    def _describe(self, **event: Any) -> None:
        key = triton_cache.entry_key(bytes.fromhex(event["metadata"]["hash"]))
        self._kernels[key] = describe_kernel(event["src"], event["metadata"])

    def _fetch(self, key: str) -> None:
        """Copy the entry into the directory if an image or the store has it. One thread at a time per key."""
        with self._lock:
            lock = self._key_locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._origins:
                self._origins[key] = self._find(key)

    def _find(self, key: str) -> Origin:
        if self._load(self.directory, key, repair=True) is not None:
            return "cache"
        for image in self.images:
            start = time.perf_counter()
            if (files := self._load(image, key)) is not None and self._store_entry(key, files):
                self._image_seconds += time.perf_counter() - start
                return "image"
        if (store := self.store) is not None:
            files = self.breaker.call("read", lambda: store.pull(key))
            if files is not None and self._store_entry(key, files):
                return "store"
        return "compiled"

    def _load(self, directory: Path, key: str, *, repair: bool = False) -> triton_cache.Files | None:
        """A valid entry of a directory, or None. `repair`: relocate a valid entry, invalidate a corrupt one."""
        try:
            files = _load_twice(directory, key)
            if repair and files is not None:
                triton_cache.relocate_entry(directory, key)
            return files
        except triton_cache.CorruptEntry as error:
            self.problems.append(f"{directory / key}: {error}")
            if repair:
                self._invalidate(key)
        except OSError as error:
            self.problems.append(f"{directory / key}: {error}")
        return None

    def _invalidate(self, key: str) -> None:
        try:
            triton_cache.invalidate(self.directory, key)
        except OSError as error:
            self.unwritable = str(error)

    def _has(self, key: str) -> bool:
        try:
            return _load_twice(self.directory, key) is not None
        except triton_cache.CorruptEntry:
            return False

    def _store_entry(self, key: str, files: triton_cache.Files) -> bool:
        try:
            triton_cache.store(self.directory, key, files)
        except OSError as error:
            self.unwritable = str(error)
            return False
        return True


def _load_twice(directory: Path, key: str) -> triton_cache.Files | None:
    try:
        return triton_cache.load(directory, key)
    except triton_cache.CorruptEntry:
        # Another process may just have been writing the entry; if it is corrupt, the second read fails too.
        return triton_cache.load(directory, key)
