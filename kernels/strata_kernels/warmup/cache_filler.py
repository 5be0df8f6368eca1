"""Fill Triton's cache with what others have compiled already, as Triton asks for it.

    seeder = Seeder(directory, images=[Path("/opt/kernels/sm_90")], store=store)
    with seeder.at_work():
        report = warmup(plan)
    seeder.push()

Triton asks for every entry by its key before it compiles: for kernels, their launchers and the driver's helper. The
answer is looked for in the cache directory, in the images, in the store, in that order; what none of them has, Triton
compiles, and `push` gives it to the store. Every entry is checked before Triton sees it. Nothing here raises for what
is wrong with a directory or a store: it is noted in `problems`, and Triton compiles.
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
from .compile_counter import listening
from .kernel_description import Description, describe
from .store import Store
from .time_budget import Patience

Origin = Literal["cache", "image", "store", "compiled"]
ORIGINS: tuple[Origin, ...] = ("cache", "image", "store", "compiled")

_PUSHERS = 16


@dataclass
class Seeder:
    """Where the entries of one process come from.

    directory: Triton's cache directory, which TRITON_CACHE_DIR names.
    images: directories like it that are only read, such as what was baked into a container image.
    store: asked for what is not in them, while `patience` lasts.
    """

    directory: Path
    images: Sequence[Path] = ()
    store: Store | None = None
    patience: Patience = field(default_factory=Patience)
    unwritable: str | None = None
    """Why the directory takes no more, if so: what Triton could not write it will not find again."""
    pushed: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, threading.Lock] = {}
        self._origins: dict[str, Origin] = {}
        self._kernels: dict[str, Description] = {}
        self._image_seconds = 0.0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the context is open, Triton's questions in this process, by any thread, are answered from here."""
        before, knobs.cache.manager_class = knobs.cache.manager_class, self._manager()
        try:
            with listening(self._note):
                yield
        finally:
            knobs.cache.manager_class = before

    @property
    def problems(self) -> list[str]:
        """What went wrong, for a person to read."""
        return self.patience.problems

    @property
    def kernels(self) -> list[Description]:
        """The kernels that Triton asked for, as they differ from each other."""
        return list(self._kernels.values())

    def counts(self) -> dict[Origin, int]:
        """How many of the kernels came from where; launchers and helpers are not counted."""
        found = Counter(self._origins.get(key, "compiled") for key in self._kernels)
        return {origin: found[origin] for origin in ORIGINS}

    def push(self) -> None:
        """Give the store what was compiled, and keep it within its limit."""
        if (store := self.store) is None:
            return
        compiled = [key for key, origin in self._origins.items() if origin == "compiled"]
        whole = [(key, files) for key in compiled if (files := self._whole(self.directory, key)) is not None]
        with ThreadPoolExecutor(_PUSHERS) as pool:
            done = pool.map(lambda entry: self.patience.ask("push to", lambda: store.push(*entry)), whole)
            self.pushed = sum(answer is True for answer in done)
        self.patience.ask("renew marks in", store.renew)
        if self.pushed:
            self.patience.ask("trim", store.trim)
        self.patience.problems += store.refusals()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: where the kernels came from, seconds (added up over threads), and what went wrong;
        `unwritable` only where there is a reason.
        """
        counts = self.counts()
        return {
            **({} if self.unwritable is None else {"unwritable": self.unwritable}),
            "directory": str(self.directory),
            **{f"{origin}_hits": counts[origin] for origin in ORIGINS if origin != "compiled"},
            "pushed": self.pushed,
            "image_seconds": self._image_seconds,
            "store_seconds": self.patience.spent,
            "problems": self.problems,
        }

    def _manager(self) -> type[FileCacheManager]:
        seeder = self

        class SeededCacheManager(FileCacheManager):  # type: ignore[misc]
            """Triton's own, over a directory that has the entry if anybody has it."""

            def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
                if not override and not dump:
                    seeder._fetch(key)
                with seeder._noting_unwritable():
                    super().__init__(key, override, dump)

            def put(self, data: Any, filename: str, binary: bool = True) -> str:
                with seeder._noting_unwritable():
                    if not filename.endswith(triton_cache.ALONE):
                        return str(super().put(data, filename, binary))
                    with seeder._asked[self.key], triton_cache.changing(seeder.directory, self.key):
                        # Threads and processes build the same helper side by side, and no two builds are the same
                        # bytes. The first one stays, or the seal would be of another one than the file.
                        if not seeder._has(self.key):
                            contents = data if isinstance(data, bytes) else str(data).encode()
                            triton_cache.write_seal(seeder.directory, self.key, {filename: contents})
                            super().put(data, filename, binary)
                        return str(self._make_path(filename))

            def put_group(self, filename: str, group: dict[str, str]) -> str:
                with seeder._noting_unwritable():
                    files = {name: Path(path).read_bytes() for name, path in group.items()}
                    triton_cache.write_seal(seeder.directory, self.key, files)
                    return str(super().put_group(filename, group))

        return SeededCacheManager

    @contextmanager
    def _noting_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.unwritable = str(error)
            raise

    def _note(self, **event: Any) -> None:
        key = triton_cache.key_of(bytes.fromhex(event["metadata"]["hash"]))
        self._kernels[key] = describe(event["src"], event["metadata"])

    def _fetch(self, key: str) -> None:
        """Let the directory have the entry, if anybody has it. The second to ask for a key waits for the first."""
        with self._lock:
            asked = self._asked.setdefault(key, threading.Lock())
        with asked:
            if key not in self._origins:
                self._origins[key] = self._find(key)

    def _find(self, key: str) -> Origin:
        if self._whole(self.directory, key, mend=True) is not None:
            return "cache"
        for image in self.images:
            start = time.perf_counter()
            if (files := self._whole(image, key)) is not None and self._keep(key, files):
                self._image_seconds += time.perf_counter() - start
                return "image"
        if (store := self.store) is not None:
            files = self.patience.ask("read", lambda: store.pull(key))
            if files is not None and self._keep(key, files):
                return "store"
        return "compiled"

    def _whole(self, directory: Path, key: str, *, mend: bool = False) -> triton_cache.Files | None:
        """An entry of a directory, if it may be used. `mend`: let Triton find it where it is, or not find it."""
        try:
            files = _load(directory, key)
            if mend and files is not None:
                triton_cache.relocate_entry(directory, key)
            return files
        except triton_cache.Damaged as damage:
            self.problems.append(f"{directory / key}: {damage}")
            if mend:
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
            return _load(self.directory, key) is not None
        except triton_cache.Damaged:
            return False

    def _keep(self, key: str, files: triton_cache.Files) -> bool:
        try:
            triton_cache.store(self.directory, key, files)
        except OSError as error:
            self.unwritable = str(error)
            return False
        return True


def _load(directory: Path, key: str) -> triton_cache.Files | None:
    try:
        return triton_cache.load(directory, key)
    except triton_cache.Damaged:
        # Another process may have been writing it meanwhile: what is damaged looks so again.
        return triton_cache.load(directory, key)
