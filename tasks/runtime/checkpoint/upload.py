"""Upload of checkpoints to an object store in the background, and their download at a start.

Checkpoints are always written to disk first. A thread of rank 0 uploads each one when it is complete; while the store
is unreachable they wait on disk, where the newest ones are kept anyway. The newest is uploaded first, and the one being
uploaded is not pruned. So even a store that is slower than the checkpoints come always gets some of them.
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

# Seconds that a start waits for the store: an error at the start is usually permanent.
STARTUP_TIMEOUT = 60.0
# Seconds that a process which is stopping gives to an upload in progress.
SHUTDOWN_TIMEOUT = 20.0

T = TypeVar("T")


class _Cancelled(Exception):
    """The process is ending, so the upload is not retried."""


class CheckpointUploader:
    """Keeps a copy of the run's checkpoints under `checkpoint.url`. For rank 0 only.

    Methods that use the store raise Unreachable when it has been unreachable for longer than their timeout.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder) -> None:
        """Raises ValueError when the URL cannot be opened."""
        assert spec.checkpoint.url is not None
        self._spec, self._settings, self._folder = spec, spec.checkpoint, folder
        self._store = RunStore(spec.checkpoint.url, spec.name)
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.uploading: Path | None = None
        """The checkpoint being uploaded, which must not be pruned from disk."""
        self._cancelled = threading.Event()
        self._failure: ValueError | Unreachable | None = None
        self._thread: threading.Thread | None = None

    def download_run_files(self) -> None:
        """Download the small files of the run folder that are missing on disk, and those of what the run began with if
        the store has a newer checkpoint.

        Raises ValueError when the store cannot be read or holds a run of another spec under this name, or when the
        store or the disk has files that belong to no run.
        """
        stored = RunFolder(self._folder.root / ".theirs")
        if not self._retry_at_start(partial(self._store.download_file, stored.spec)):
            entries = self._retry_at_start(self._store.list_files)
            small = {path.name for path in self._small_files()}
            own = [name for name in entries if name.startswith(manifest.PREFIX) or name in small]
            refuse_unowned_files(own, self._store.url, "checkpoint.url")
            return
        try:
            for path in stored.pinned_files:
                self._retry_at_start(partial(self._store.download_file, path))
            done = max(self._retry_at_start(self._store.complete_steps), default=0)
            require_same_run(stored, self._spec, done, self._store.url)
        except SpecError as error:
            # Name the file in the store: the downloaded copy is deleted below.
            raise SpecError(error.problems, f"{self._store.url}/{stored.spec.name}") from error
        finally:
            shutil.rmtree(stored.root)
        # Before the spec is downloaded: with a spec, other people's files would count as the run's.
        self._folder.require_no_unowned_files()
        newer = done > manifest.newest_step(self._folder.checkpoints)
        # The spec first: a folder without one belongs to no run.
        for path in self._small_files():
            # Those on disk may be of a start that ended before a checkpoint, while another machine began anew.
            replaced = newer and path in self._folder.pinned_files
            if not replaced and path.exists():
                continue
            if not self._retry_at_start(partial(self._store.download_file, path)):
                path.unlink(missing_ok=True)

    def upload_spec(self) -> None:
        """Claim the folder in the store, which also checks write access. Raises ValueError when that fails."""
        self._retry_at_start(partial(self._store.upload_file, self._folder.spec))

    def download_latest(self) -> Path | None:
        """Download the newest complete checkpoint, unless the disk has it or a newer one.

        Returns the newest complete checkpoint on disk, whose files this call has verified. Raises ValueError when the
        store cannot be read.
        """
        on_disk = manifest.latest(self._folder.checkpoints)
        done = manifest.step_of(on_disk) if on_disk else 0
        newer = [step for step in self._retry_at_start(self._store.complete_steps) if step > done]
        if newer:
            # Metrics first: if this start is killed here, the next one finds the checkpoint and downloads nothing.
            self._retry_at_start(partial(self._store.download_file, self._folder.metrics))
        latest = on_disk
        for step in reversed(newer):
            if self._download(step):
                latest = self._folder.checkpoints / f"{manifest.PREFIX}{step}"
                break
        self._download_best()
        return latest

    def _download_best(self) -> None:
        """Download the checkpoint that the newest one calls the best, unless the disk has it."""
        best = manifest.best_step(self._folder.checkpoints)
        if best is None or (self._folder.checkpoints / f"{manifest.PREFIX}{best}" / manifest.MANIFEST).exists():
            return
        if best in self._retry_at_start(self._store.complete_steps):
            self._download(best)

    def discard_after(self, step: int) -> None:
        """Delete checkpoints of later steps, which the run will compute again."""
        for other in self._retry_at_start(self._store.complete_steps):
            if other > step:
                self._retry_at_start(partial(self._store.delete, other))

    def enqueue(self, folder: Path) -> None:
        """Enqueue a checkpoint that is complete, or whose metadata has changed, for upload.

        Raises ValueError when an earlier upload failed.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload_loop, name="checkpoint-upload", daemon=True)
            self._thread.start()
        self._queue.put(folder)
        self._raise_failure()

    def enqueue_pending(self, latest: Path) -> None:
        """At a start: enqueue `latest`, a complete checkpoint, and all others that an earlier start did not upload.

        Raises ValueError when the store cannot be read.
        """
        self.enqueue(latest)
        on_disk = {
            manifest.step_of(folder): folder
            for folder in manifest.folders(self._folder.checkpoints)
            if folder != latest
        }
        in_store = self._retry_at_start(self._store.complete_steps)
        steps = sorted({*on_disk, *in_store, manifest.step_of(latest)})
        pruned = self._to_prune(steps)
        for step in on_disk.keys() - {*pruned, *in_store}:
            if manifest.verification_error(on_disk[step]) is None:
                self.enqueue(on_disk[step])

    def finish(self) -> None:
        """Wait until all checkpoints are uploaded. Raises ValueError when an upload failed."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def close(self) -> None:
        """Stop the uploads of a process that is ending; the upload in progress gets a few seconds."""
        self._cancelled.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(SHUTDOWN_TIMEOUT)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _download(self, step: int) -> bool:
        log.info("downloading checkpoint-%d from %s", step, self._store.url)
        reason = retry(partial(self._download_and_verify, step), self._store.url, self._settings.url_timeout)
        if reason is not None:
            log.warning("checkpoint-%d of %s is not used: %s", step, self._store.url, reason)
        return reason is None

    def _download_and_verify(self, step: int) -> str | None:
        """Why the downloaded checkpoint cannot be used, or None."""
        try:
            return manifest.verification_error(self._store.download(step, self._folder.checkpoints))
        except FileNotFoundError as error:
            return f"{error} is missing"

    def _upload_loop(self) -> None:
        for folder in self._newest_first():
            self.uploading = folder
            try:
                retry(partial(self._upload, folder), self._store.url, self._settings.url_timeout, self._sleep)
            except _Cancelled:
                return
            except (ValueError, Unreachable) as error:
                self._failure = error
                return
            finally:
                self.uploading = None

    def _newest_first(self) -> Iterator[Path]:
        """Enqueued checkpoints, the newest first; ends when the queue is closed and empty."""
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

    def _upload(self, folder: Path) -> None:
        step, in_store = manifest.step_of(folder), self._store.complete_steps()
        if step in self._to_prune(sorted({*in_store, step})):
            return
        try:
            # Metrics first: a complete checkpoint implies that the metrics have every step up to it.
            for path in self._small_files():
                if path.exists():
                    self._store.upload_file(path)
            self._store.upload(folder)
        except FileNotFoundError:
            # It may have been pruned from disk while it waited. Pruning deletes the manifest first.
            if (folder / manifest.MANIFEST).exists():
                raise
            log.warning("checkpoint-%d was pruned from disk before it was uploaded to %s", step, self._store.url)
            self._store.delete(step)
            return
        self._prune()

    def _prune(self) -> None:
        """Delete checkpoints that the spec does not keep, and remains of older ones from interrupted transfers."""
        kept = self._store.complete_steps()[-self._settings.keep_last :]
        older = [step for step in self._store.all_steps() if step < min(kept, default=0)]
        for step in self._to_prune([*older, *kept]):
            self._store.delete(step)

    def _to_prune(self, steps: list[int]) -> list[int]:
        best = manifest.best_step(self._folder.checkpoints)
        return manifest.to_prune(steps, self._settings.keep_last, self._settings.keep_every, best)

    def _small_files(self) -> list[Path]:
        return [self._folder.spec, *self._folder.pinned_files, self._folder.metrics, self._folder.attempts]

    def _retry_at_start(self, call: Callable[[], T]) -> T:
        return retry(call, self._store.url, STARTUP_TIMEOUT)

    def _sleep(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise _Cancelled


def uploader_for(spec: RunSpec, folder: RunFolder) -> CheckpointUploader | None:
    """The uploader for `checkpoint.url`, or None without one. Raises ValueError when the URL cannot be opened."""
    return CheckpointUploader(spec, folder) if spec.checkpoint.url else None
