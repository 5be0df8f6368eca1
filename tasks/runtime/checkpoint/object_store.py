"""The run folder in an object store: checkpoints and the small files needed to resume on a new machine.

fsspec opens the store by the scheme of its URL. A checkpoint has the same files there as on disk. Its manifest is
uploaded last and deleted first, so a folder without a manifest was left by an upload that did not finish.
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

from strata_platform.run_layout import LEASE, LOGS
from tasks.runtime.checkpoint import manifest
from tasks.runtime.process.errors import Unreachable, is_final
from tasks.runtime.process.object_store_url import open_url

log = logging.getLogger(__name__)

# Files that are transferred at the same time.
_PARALLEL_TRANSFERS = 4
# Retries, over about a minute, for a file that the manifest names and that the store does not have yet.
_MISSING_FILE_RETRIES = 6
# Seconds between two attempts.
INITIAL_BACKOFF, MAX_BACKOFF = 1.0, 60.0

_RESTART_HINT = "start the run again: it continues from its newest checkpoint, on disk or in the store"

T = TypeVar("T")


class RunStore:
    """The folder of one run in an object store. Its methods raise the errors of the store's client."""

    def __init__(self, url: str, name: str) -> None:
        """Raises ValueError when no client is installed for the URL's scheme, or it rejects the URL."""
        self.url = f"{url.rstrip('/')}/{name}"
        self._fs, root = open_url(url, "checkpoint.url")
        self._root = f"{root.rstrip('/')}/{name}"

    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints in the store, newest last."""
        return [step for step in self.all_steps() if manifest.MANIFEST in self._list(self._folder(step))]

    def all_steps(self) -> list[int]:
        """Steps of all checkpoints in the store, complete or not, newest last."""
        self._fs.invalidate_cache()
        # A listing, not a glob: the URL may contain characters that a glob interprets, and a glob hides errors.
        names = (name for name in self._list(self._root) if name.startswith(manifest.PREFIX))
        return sorted(int(step) for step in (name.removeprefix(manifest.PREFIX) for name in names) if step.isdigit())

    def list_files(self) -> list[str]:
        """Names of the files and folders in the run's folder; empty when it does not exist."""
        self._fs.invalidate_cache()
        return sorted(self._list(self._root))

    def upload(self, folder: Path) -> None:
        """Upload a complete checkpoint; only its manifest when the store has the same files already."""
        target, files = self._folder(manifest.step_of(folder)), manifest.read_files(folder)
        if self._files_at(target) != files:
            self._remove(target)
            self._fs.makedirs(target, exist_ok=True)
            _in_parallel(lambda name: self._fs.put_file(str(folder / name), f"{target}/{name}"), files)
        self._write(f"{target}/{manifest.MANIFEST}", (folder / manifest.MANIFEST).read_bytes())

    def download(self, step: int, root: Path) -> Path:
        """Download a checkpoint into the folder `root`. If its manifest is unreadable, download only the manifest."""
        source, folder = self._folder(step), root / f"{manifest.PREFIX}{step}"
        content = self._fs.cat_file(f"{source}/{manifest.MANIFEST}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        names = list(manifest.parse_files(content) or ())
        if any(Path(name).name != name for name in names):
            raise ValueError(f"the manifest of {self.url}/{manifest.PREFIX}{step} names files outside its folder")
        _in_parallel(lambda name: self._get(f"{source}/{name}", folder / name), names)
        (folder / manifest.MANIFEST).write_bytes(content)
        return folder

    def delete(self, step: int) -> None:
        """Delete a checkpoint from the store."""
        self._remove(self._folder(step))

    def upload_file(self, path: Path) -> None:
        """Upload a small file of the run folder."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._write(f"{self._root}/{path.name}", path.read_bytes())

    def download_file(self, path: Path) -> bool:
        """Download the file of this name to `path`; returns False when the store does not have it."""
        self._fs.invalidate_cache()
        if not self._fs.exists(f"{self._root}/{path.name}"):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_bytes(self._fs.cat_file(f"{self._root}/{path.name}"))
        temporary.replace(path)
        return True

    def delete_if_only(self, path: Path) -> None:
        """Delete a file from the run's folder if nothing else is in it, but for the lease and the logs of its pods."""
        self._fs.invalidate_cache()
        if {*self._list(self._root)} - {LEASE, LOGS} == {path.name}:
            self._fs.rm_file(f"{self._root}/{path.name}")

    def _folder(self, step: int) -> str:
        return f"{self._root}/{manifest.PREFIX}{step}"

    def _get(self, source: str, path: Path) -> None:
        """Download a file that a manifest names; wait a while if it is missing."""
        for attempt in range(_MISSING_FILE_RETRIES):
            with suppress(FileNotFoundError):
                self._fs.get_file(source, str(path))
                return
            # With replication between sites, large files may arrive after their manifest. Without the wait the
            # checkpoint would count as corrupt and be deleted.
            time.sleep(INITIAL_BACKOFF * 2**attempt)
            self._fs.invalidate_cache()
        self._fs.get_file(source, str(path))

    def _write(self, path: str, content: bytes) -> None:
        """Replace a file atomically."""
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(path, content)
            return
        # An object store replaces objects atomically, a folder does not: after a kill the file would be truncated.
        self._fs.pipe_file(f"{path}.part", content)
        self._fs.mv(f"{path}.part", path)

    def _files_at(self, target: str) -> dict[str, Any] | None:
        try:
            return manifest.parse_files(self._fs.cat_file(f"{target}/{manifest.MANIFEST}"))
        except FileNotFoundError:
            return None

    def _list(self, folder: str) -> list[str]:
        """Names in a folder of the store; empty when it does not exist."""
        try:
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _remove(self, target: str) -> None:
        self._fs.invalidate_cache()
        names = self._list(target)
        if manifest.MANIFEST in names:
            self._fs.rm_file(f"{target}/{manifest.MANIFEST}")
        # File by file: some clients interpret the name of a folder to delete as a glob.
        _in_parallel(lambda name: self._fs.rm_file(f"{target}/{name}"), {*names} - {manifest.MANIFEST})
        if self._fs.exists(target):
            with suppress(OSError):
                self._fs.rmdir(target)


def _in_parallel(call: Callable[[str], object], names: Iterable[str]) -> None:
    """Call `call` with each name in a few threads; raises the first error.

    Daemon threads instead of a ThreadPoolExecutor: the interpreter waits at exit for an executor's threads, which would
    delay a process that received SIGTERM.
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
        # On an interrupt, start no further transfer.
        waiting.clear()
    if errors:
        raise errors[0]


def undo_upload(url: str, name: str, path: Path) -> None:
    """`RunStore.delete_if_only` for a process that is already failing: it logs a warning instead of raising."""
    try:
        RunStore(url, name).delete_if_only(path)
    except Exception as error:
        log.warning("%s could not be deleted from %s/%s: %s: %s", path.name, url, name, type(error).__name__, error)


def retry(call: Callable[[], T], url: str, timeout: float, sleep: Callable[[float], object] = time.sleep) -> T:
    """Return `call()`; retry with exponential backoff for `timeout` seconds after its first failure.

    sleep: waits for a number of seconds; may raise to give up.

    Raises:
        ValueError: an error that a retry does not fix, such as missing permissions.
        Unreachable: the last retry failed.
    """
    deadline, wait = math.inf, INITIAL_BACKOFF
    failed = False
    while True:
        try:
            result = call()
        # The clients' errors have no common base class.
        except Exception as error:
            if not failed:
                # Counted from the first failure: the transfer of a large checkpoint may take longer than the timeout.
                deadline = time.monotonic() + timeout
            reason = f"{type(error).__name__}: {error}"
            if is_final(error):
                raise ValueError(
                    f"checkpoint.url: {url} cannot be used: {reason}. Fix that and {_RESTART_HINT}"
                ) from error
            if time.monotonic() + wait > deadline:
                raise Unreachable(
                    f"checkpoint.url: {url} cannot be reached: {reason}. When it can, {_RESTART_HINT}"
                ) from error
            if not failed:
                log.warning("%s cannot be reached (%s); trying again", url, reason)
            failed = True
            sleep(wait)
            wait = min(2 * wait, MAX_BACKOFF)
        else:
            if failed:
                log.info("%s can be reached again", url)
            return result
