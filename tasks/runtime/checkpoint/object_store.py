"""A run in an object store: its checkpoints, and what else it takes to continue it on a machine that has nothing.

The store is what fsspec knows by the URL's scheme. A checkpoint there has the files of one on the disk; its manifest
comes last and goes first, so that a folder without one is what an upload left.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from tasks.runtime.checkpoint import manifest
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.object_store_url import open_url

log = logging.getLogger(__name__)

# Files that travel at the same time.
_PARALLEL_TRANSFERS = 4
# How often a file is asked for once more that its manifest names and the store has not: for a minute.
_MISSING_FILE_RETRIES = 6
# Seconds between two attempts: first, and at most.
INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 60.0
# What no later attempt mends.
_NOT_RETRYABLE = (PermissionError, FileNotFoundError, NotADirectoryError, ImportError, ValueError)

_RESTART_HINT = "start the run again: it continues from its newest checkpoint, here or there"

T = TypeVar("T")


class RunStore:
    """The folder of a run in a store. Methods raise what the store's own client raises."""

    def __init__(self, url: str, name: str) -> None:
        """Raises ValueError when there is no client for the URL's scheme, or it cannot do with this URL."""
        self.url = f"{url.rstrip('/')}/{name}"
        self._fs, root = open_url(url, "checkpoint.url")
        self._root = f"{root.rstrip('/')}/{name}"

    def complete_steps(self) -> list[int]:
        """Steps of the checkpoints that are whole there, the newest last."""
        return [step for step in self.all_steps() if manifest.MANIFEST in self._list(self._folder(step))]

    def all_steps(self) -> list[int]:
        """Steps of all checkpoints of which there is something, whole or not, the newest last."""
        self._fs.invalidate_cache()
        # Listed: as a pattern, what the URL says may mean something else, and errors of the store would find nothing.
        named = (name for name in self._list(self._root) if name.startswith(manifest.PREFIX))
        return sorted(int(step) for step in (name.removeprefix(manifest.PREFIX) for name in named) if step.isdigit())

    def list_files(self) -> list[str]:
        """Names of what the run's folder there has; none, where there is no folder."""
        self._fs.invalidate_cache()
        return sorted(self._list(self._root))

    def upload(self, folder: Path) -> None:
        """Copy a whole checkpoint there, or its manifest alone where the files are the same."""
        target, files = self._folder(manifest.step_of(folder)), manifest.read_files(folder)
        if self._files_at(target) != files:
            self._remove(target)
            self._fs.makedirs(target, exist_ok=True)
            _in_parallel(lambda name: self._fs.put_file(str(folder / name), f"{target}/{name}"), files)
        self._write(f"{target}/{manifest.MANIFEST}", (folder / manifest.MANIFEST).read_bytes())

    def download(self, step: int, root: Path) -> Path:
        """Copy a checkpoint from there into the folder `root`; of one whose manifest is unreadable nothing else."""
        source, folder = self._folder(step), root / f"{manifest.PREFIX}{step}"
        content = self._fs.cat_file(f"{source}/{manifest.MANIFEST}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        names = list(manifest.parse_files(content) or ())
        if any(Path(name).name != name for name in names):
            raise ValueError(f"the manifest of {self.url}/{manifest.PREFIX}{step} names files outside of it")
        _in_parallel(lambda name: self._get(f"{source}/{name}", folder / name), names)
        (folder / manifest.MANIFEST).write_bytes(content)
        return folder

    def delete(self, step: int) -> None:
        """Remove a checkpoint there."""
        self._remove(self._folder(step))

    def upload_file(self, path: Path) -> None:
        """Copy a small file of the run's folder there, as it is now."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._write(f"{self._root}/{path.name}", path.read_bytes())

    def download_file(self, path: Path) -> bool:
        """Copy the file of this name from the run's folder there; says whether there is one."""
        self._fs.invalidate_cache()
        if not self._fs.exists(f"{self._root}/{path.name}"):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.part")
        unfinished.write_bytes(self._fs.cat_file(f"{self._root}/{path.name}"))
        unfinished.replace(path)
        return True

    def delete_if_only(self, path: Path) -> None:
        """Remove a file of the run's folder there, unless there is anything else."""
        self._fs.invalidate_cache()
        if self._list(self._root) == [path.name]:
            self._fs.rm_file(f"{self._root}/{path.name}")

    def _folder(self, step: int) -> str:
        return f"{self._root}/{manifest.PREFIX}{step}"

    def _get(self, source: str, path: Path) -> None:
        """Copy a file that a manifest names from there."""
        for attempt in range(_MISSING_FILE_RETRIES):
            with suppress(FileNotFoundError):
                self._fs.get_file(source, str(path))
                return
            # Where sites copy from each other, large files may come after their manifest. Without them the checkpoint
            # would pass for damaged, and be removed.
            time.sleep(INITIAL_BACKOFF * 2**attempt)
            self._fs.invalidate_cache()
        self._fs.get_file(source, str(path))

    def _write(self, path: str, content: bytes) -> None:
        """Replace a file there, which others see as it was or as it is to be."""
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(path, content)
            return
        # What is no store of objects would have a part of it after a kill, or none where the disk is full.
        self._fs.pipe_file(f"{path}.part", content)
        self._fs.mv(f"{path}.part", path)

    def _files_at(self, target: str) -> dict[str, Any] | None:
        try:
            return manifest.parse_files(self._fs.cat_file(f"{target}/{manifest.MANIFEST}"))
        except FileNotFoundError:
            return None

    def _list(self, folder: str) -> list[str]:
        """What a folder there has; nothing, where there is none."""
        try:
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _remove(self, target: str) -> None:
        self._fs.invalidate_cache()
        names = self._list(target)
        if manifest.MANIFEST in names:
            self._fs.rm_file(f"{target}/{manifest.MANIFEST}")
        # One by one: clients that remove a folder take its name for a pattern, too.
        _in_parallel(lambda name: self._fs.rm_file(f"{target}/{name}"), {*names} - {manifest.MANIFEST})
        if self._fs.exists(target):
            with suppress(OSError):
                self._fs.rmdir(target)


def _in_parallel(call: Callable[[str], object], names: Iterable[str]) -> None:
    """`call` of each of the names, several at a time; raises the first error.

    No executor: the interpreter waits at its end for the threads of one, and so would a process that is told to end.
    """
    waiting, errors = deque(names), list[Exception]()

    def work() -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                call(name)
            except Exception as error:
                errors.append(error)
                waiting.clear()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_PARALLEL_TRANSFERS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        # Of what interrupts this: nothing more is begun.
        waiting.clear()
    if errors:
        raise errors[0]


def undo_upload(url: str, name: str, path: Path) -> None:
    """`RunStore.delete_if_only`, for a process that ends for another reason: what goes wrong is told, and no more."""
    try:
        RunStore(url, name).delete_if_only(path)
    except Exception as error:
        log.warning("%s of %s/%s stays there: %s: %s", path.name, url, name, type(error).__name__, error)


def retry(call: Callable[[], T], url: str, timeout: float, pause: Callable[[float], object] = time.sleep) -> T:
    """The result of `call`, which is tried again for `timeout` seconds after it failed, at intervals that double.

    `pause` waits for so many seconds; it gives up by raising. Raises ValueError when no further attempt would mend it,
    and Unreachable when the last one failed.
    """
    deadline, wait = math.inf, INITIAL_BACKOFF
    failed = False
    while True:
        try:
            result = call()
        # A store's client raises errors of its own, of no common class.
        except Exception as error:
            if not failed:
                # Not from the beginning: a large checkpoint travels for longer than that, and may be torn off once.
                deadline = time.monotonic() + timeout
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, _NOT_RETRYABLE):
                raise ValueError(
                    f"checkpoint.url: {url} cannot be used: {said}. Mend that, and {_RESTART_HINT}"
                ) from error
            if time.monotonic() + wait > deadline:
                raise Unreachable(
                    f"checkpoint.url: {url} cannot be reached: {said}. When it can, {_RESTART_HINT}"
                ) from error
            if not failed:
                log.warning("%s cannot be reached (%s: %s); trying again", url, type(error).__name__, error)
            failed = True
            pause(wait)
            wait = min(2 * wait, MAX_BACKOFF)
        else:
            if failed:
                log.info("%s can be reached again", url)
            return result
