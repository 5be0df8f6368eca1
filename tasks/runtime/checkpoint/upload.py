"""Copies a run's checkpoints to an object store while training goes on, and brings them back.

Checkpoints are written to the disk first, whatever the store does. A thread of the main process copies each when it is
whole; while the store is away they wait on the disk, where the newest ones are kept anyway. The newest goes first, and
the one under way stays on the disk: so a store that is slower than checkpoints come has some of them, and not none.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint import manifest
from tasks.runtime.checkpoint.object_store import RunStore, retry
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.run_folder.folder import RunFolder, refuse_unowned_files, require_same_run

log = logging.getLogger(__name__)

# Seconds that a start waits for a store: what is wrong then is most often wrong for good.
STARTUP_TIMEOUT = 60.0
# Seconds that a process which is told to end gives to copies under way.
SHUTDOWN_TIMEOUT = 20.0

T = TypeVar("T")


class _Cancelled(Exception):
    """The process ends; there is no further attempt."""


class CheckpointUploader:
    """The run's folder in the store that `checkpoint.url` names. Its methods are for the main process alone.

    All that ask the store raise Unreachable when it has been away for longer than it may.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder) -> None:
        """Raises ValueError when the URL names no store."""
        assert spec.checkpoint.url is not None
        self._spec, self._settings, self._folder = spec, spec.checkpoint, folder
        self._store = RunStore(spec.checkpoint.url, spec.name)
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.uploading: Path | None = None
        """The checkpoint under way, which is to stay on the disk until it is there."""
        self._cancelled = threading.Event()
        self._failure: ValueError | Unreachable | None = None
        self._thread: threading.Thread | None = None

    def download_run_files(self) -> None:
        """Bring what a machine lacks that has no folder of this run.

        Raises ValueError when the store cannot be read, or has a run of another spec by this name, or when what is
        there or here is no run's.
        """
        theirs = RunFolder(self._folder.root / ".theirs")
        if not self._retry_at_start(partial(self._store.download_file, theirs.spec)):
            entries = self._retry_at_start(self._store.list_files)
            small = {path.name for path in self._small_files()}
            own = [name for name in entries if name.startswith(manifest.PREFIX) or name in small]
            refuse_unowned_files(own, self._store.url, "checkpoint.url")
            return
        try:
            self._retry_at_start(partial(self._store.download_file, theirs.data_commit))
            require_same_run(theirs, self._spec, self._store.url)
        except SpecError as error:
            # A person finds it there: what was fetched is removed.
            raise SpecError(error.problems, f"{self._store.url}/{theirs.spec.name}") from error
        finally:
            shutil.rmtree(theirs.root)
        # While it has no spec: with one that is fetched it would pass for the run's.
        self._folder.require_no_unowned_files()
        # Its spec first: a folder without one is nobody's.
        for path in self._small_files():
            if not path.exists():
                self._retry_at_start(partial(self._store.download_file, path))

    def upload_spec(self) -> None:
        """Claim the folder there, and see that it can be written. Raises ValueError when it cannot."""
        self._retry_at_start(partial(self._store.upload_file, self._folder.spec))

    def download_latest(self) -> None:
        """Bring the newest whole checkpoint, if it is newer than what the disk has.

        Raises ValueError when the store cannot be read.
        """
        here = manifest.latest(self._folder.checkpoints)
        done = manifest.step_of(here) if here else 0
        newer = [step for step in self._retry_at_start(self._store.complete_steps) if step > done]
        if newer:
            # Metrics first: a start after one that was killed in here finds the checkpoint, and looks no further.
            self._retry_at_start(partial(self._store.download_file, self._folder.metrics))
        for step in reversed(newer):
            if self._download(step):
                return

    def discard_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which the run is about to compute anew."""
        for other in self._retry_at_start(self._store.complete_steps):
            if other > step:
                self._retry_at_start(partial(self._store.delete, other))

    def enqueue(self, folder: Path) -> None:
        """Have a checkpoint copied, which is whole, or whose manifest has changed.

        Raises ValueError when the store refuses what has been copied so far.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()
        self._queue.put(folder)
        self._raise_failure()

    def enqueue_pending(self, latest: Path) -> None:
        """At a start: have `latest`, which is whole, copied, and what is kept here and an earlier start left waiting.

        Raises ValueError when the store cannot be read.
        """
        self.enqueue(latest)
        here = {
            manifest.step_of(folder): folder
            for folder in manifest.folders(self._folder.checkpoints)
            if folder != latest
        }
        there = self._retry_at_start(self._store.complete_steps)
        steps = sorted({*here, *there, manifest.step_of(latest)})
        dropped = manifest.to_prune(steps, self._settings.keep_last, self._settings.keep_every)
        for step in here.keys() - {*dropped, *there}:
            if manifest.verification_error(here[step]) is None:
                self.enqueue(here[step])

    def finish(self) -> None:
        """Return when all is copied. Raises ValueError when it cannot be."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self) -> None:
        """For a process that ends for another reason: give what is under way a little time."""
        self._cancelled.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(SHUTDOWN_TIMEOUT)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _download(self, step: int) -> bool:
        log.info("fetching checkpoint-%d from %s", step, self._store.url)
        timeout = self._settings.url_timeout
        reason = retry(partial(self._download_complete, step), self._store.url, timeout)
        if reason is not None:
            log.warning("checkpoint-%d of %s is not used: %s", step, self._store.url, reason)
        return reason is None

    def _download_complete(self, step: int) -> str | None:
        """Why it cannot be used."""
        try:
            return manifest.verification_error(self._store.download(step, self._folder.checkpoints))
        except FileNotFoundError as error:
            return f"{error} is missing"

    def _work(self) -> None:
        for folder in self._newest_first():
            self.uploading = folder
            try:
                retry(partial(self._copy, folder), self._store.url, self._settings.url_timeout, self._pause)
            except _Cancelled:
                return
            except (ValueError, Unreachable) as error:
                self._failure = error
                return
            finally:
                self.uploading = None

    def _newest_first(self) -> Iterator[Path]:
        """What is to be copied, the newest first, until no more comes and all had their turn."""
        waiting: set[Path] = set()
        more = True
        while more or waiting:
            while more and (not waiting or not self._queue.empty()):
                folder = self._queue.get()
                if folder is None:
                    more = False
                else:
                    waiting.add(folder)
            if waiting:
                newest = max(waiting, key=manifest.step_of)
                waiting.remove(newest)
                yield newest

    def _copy(self, folder: Path) -> None:
        step, there = manifest.step_of(folder), self._store.complete_steps()
        if step in manifest.to_prune(sorted({*there, step}), self._settings.keep_last, self._settings.keep_every):
            return
        try:
            # Metrics first: a whole checkpoint implies that every step up to it is on record.
            for path in self._small_files():
                if path.exists():
                    self._store.upload_file(path)
            self._store.upload(folder)
        except FileNotFoundError:
            # Newer ones may have taken its place on the disk before its turn: then its manifest was the first to go.
            if (folder / manifest.MANIFEST).exists():
                raise
            log.warning("checkpoint-%d left the disk before it was copied to %s", step, self._store.url)
            self._store.delete(step)
            return
        self._prune()

    def _prune(self) -> None:
        """Remove what the spec does not keep, and what is left of older ones whose copy or removal was cut short."""
        kept = self._store.complete_steps()[-self._settings.keep_last :]
        older = [step for step in self._store.all_steps() if step < min(kept, default=0)]
        for step in manifest.to_prune([*older, *kept], self._settings.keep_last, self._settings.keep_every):
            self._store.delete(step)

    def _small_files(self) -> list[Path]:
        return [self._folder.spec, self._folder.data_commit, self._folder.metrics, self._folder.attempts]

    def _retry_at_start(self, call: Callable[[], T]) -> T:
        return retry(call, self._store.url, STARTUP_TIMEOUT)

    def _pause(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise _Cancelled


def uploader_for(spec: RunSpec, folder: RunFolder) -> CheckpointUploader | None:
    """What `checkpoint.url` asks for, if anything. Raises ValueError when it names no store."""
    return CheckpointUploader(spec, folder) if spec.checkpoint.url else None
