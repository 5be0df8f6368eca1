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
from tasks.runtime.checkpoint.object_store import Remote, persist
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.run_folder.folder import RunFolder, require_no_runs_entries, require_same_run

log = logging.getLogger(__name__)

# Seconds that a start waits for a store: what is wrong then is most often wrong for good.
START_SECONDS = 60.0
# Seconds that a process which is told to end gives to copies under way.
END_SECONDS = 20.0

T = TypeVar("T")


class _Ended(Exception):
    """The process ends; there is no further attempt."""


class Mirror:
    """The run's folder in the store that `checkpoint.url` names. Its methods are for the main process alone.

    All that ask the store raise Unreachable when it has been away for longer than it may.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder) -> None:
        """Raises ValueError when the URL names no store."""
        assert spec.checkpoint.url is not None
        self._spec, self._settings, self._folder = spec, spec.checkpoint, folder
        self._remote = Remote(spec.checkpoint.url, spec.name)
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self.copying: Path | None = None
        """The checkpoint under way, which is to stay on the disk until it is there."""
        self._ending = threading.Event()
        self._failure: ValueError | Unreachable | None = None
        self._thread: threading.Thread | None = None

    def fetch_run(self) -> None:
        """Bring what a machine lacks that has no folder of this run.

        Raises ValueError when the store cannot be read, or has a run of another spec by this name, or when what is
        there or here is no run's.
        """
        theirs = RunFolder(self._folder.root / ".theirs")
        if not self._at_start(partial(self._remote.fetch_file, theirs.spec)):
            entries = self._at_start(self._remote.entries)
            small = {path.name for path in self._small_files()}
            own = [name for name in entries if name.startswith(manifest.PREFIX) or name in small]
            require_no_runs_entries(own, self._remote.url, "checkpoint.url")
            return
        try:
            self._at_start(partial(self._remote.fetch_file, theirs.data_commit))
            require_same_run(theirs, self._spec, self._remote.url)
        except SpecError as error:
            # A person finds it there: what was fetched is removed.
            raise SpecError(error.problems, f"{self._remote.url}/{theirs.spec.name}") from error
        finally:
            shutil.rmtree(theirs.root)
        # While it has no spec: with one that is fetched it would pass for the run's.
        self._folder.require_no_strangers()
        # Its spec first: a folder without one is nobody's.
        for path in self._small_files():
            if not path.exists():
                self._at_start(partial(self._remote.fetch_file, path))

    def put_spec(self) -> None:
        """Claim the folder there, and see that it can be written. Raises ValueError when it cannot."""
        self._at_start(partial(self._remote.put_file, self._folder.spec))

    def fetch_newest(self) -> None:
        """Bring the newest whole checkpoint, if it is newer than what the disk has.

        Raises ValueError when the store cannot be read.
        """
        here = manifest.latest(self._folder.checkpoints)
        done = manifest.step_of(here) if here else 0
        newer = [step for step in self._at_start(self._remote.steps) if step > done]
        if newer:
            # Metrics first: a start after one that was killed in here finds the checkpoint, and looks no further.
            self._at_start(partial(self._remote.fetch_file, self._folder.metrics))
        for step in reversed(newer):
            if self._fetch(step):
                return

    def discard_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which the run is about to compute anew."""
        for other in self._at_start(self._remote.steps):
            if other > step:
                self._at_start(partial(self._remote.remove, other))

    def add(self, folder: Path) -> None:
        """Have a checkpoint copied, which is whole, or whose manifest has changed.

        Raises ValueError when the store refuses what has been copied so far.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()
        self._waiting.put(folder)
        self._refuse()

    def add_what_waited(self, latest: Path) -> None:
        """At a start: have `latest`, which is whole, copied, and what is kept here and an earlier start left waiting.

        Raises ValueError when the store cannot be read.
        """
        self.add(latest)
        here = {
            manifest.step_of(folder): folder
            for folder in manifest.folders(self._folder.checkpoints)
            if folder != latest
        }
        there = self._at_start(self._remote.steps)
        steps = sorted({*here, *there, manifest.step_of(latest)})
        dropped = manifest.expendable(steps, self._settings.keep_last, self._settings.keep_every)
        for step in here.keys() - {*dropped, *there}:
            if manifest.damage(here[step]) is None:
                self.add(here[step])

    def finish(self) -> None:
        """Return when all is copied. Raises ValueError when it cannot be."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None
        self._refuse()

    def close(self) -> None:
        """For a process that ends for another reason: give what is under way a little time."""
        self._ending.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(END_SECONDS)

    def _refuse(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fetch(self, step: int) -> bool:
        log.info("fetching checkpoint-%d from %s", step, self._remote.url)
        patience = self._settings.url_timeout
        reason = persist(partial(self._fetch_whole, step), self._remote.url, patience)
        if reason is not None:
            log.warning("checkpoint-%d of %s is not used: %s", step, self._remote.url, reason)
        return reason is None

    def _fetch_whole(self, step: int) -> str | None:
        """Why it cannot be used."""
        try:
            return manifest.damage(self._remote.fetch(step, self._folder.checkpoints))
        except FileNotFoundError as error:
            return f"{error} is missing"

    def _work(self) -> None:
        for folder in self._turns():
            self.copying = folder
            try:
                persist(partial(self._copy, folder), self._remote.url, self._settings.url_timeout, self._pause)
            except _Ended:
                return
            except (ValueError, Unreachable) as error:
                self._failure = error
                return
            finally:
                self.copying = None

    def _turns(self) -> Iterator[Path]:
        """What is to be copied, the newest first, until no more comes and all had their turn."""
        waiting: set[Path] = set()
        more = True
        while more or waiting:
            while more and (not waiting or not self._waiting.empty()):
                folder = self._waiting.get()
                if folder is None:
                    more = False
                else:
                    waiting.add(folder)
            if waiting:
                newest = max(waiting, key=manifest.step_of)
                waiting.remove(newest)
                yield newest

    def _copy(self, folder: Path) -> None:
        step, there = manifest.step_of(folder), self._remote.steps()
        if step in manifest.expendable(sorted({*there, step}), self._settings.keep_last, self._settings.keep_every):
            return
        try:
            # Metrics first: a whole checkpoint implies that every step up to it is on record.
            for path in self._small_files():
                if path.exists():
                    self._remote.put_file(path)
            self._remote.put(folder)
        except FileNotFoundError:
            # Newer ones may have taken its place on the disk before its turn: then its manifest was the first to go.
            if (folder / manifest.MANIFEST).exists():
                raise
            log.warning("checkpoint-%d left the disk before it was copied to %s", step, self._remote.url)
            self._remote.remove(step)
            return
        self._prune()

    def _prune(self) -> None:
        """Remove what the spec does not keep, and what is left of older ones whose copy or removal was cut short."""
        kept = self._remote.steps()[-self._settings.keep_last :]
        older = [step for step in self._remote.begun() if step < min(kept, default=0)]
        for step in manifest.expendable([*older, *kept], self._settings.keep_last, self._settings.keep_every):
            self._remote.remove(step)

    def _small_files(self) -> list[Path]:
        return [self._folder.spec, self._folder.data_commit, self._folder.metrics, self._folder.attempts]

    def _at_start(self, call: Callable[[], T]) -> T:
        return persist(call, self._remote.url, START_SECONDS)

    def _pause(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise _Ended


def mirror_of(spec: RunSpec, folder: RunFolder) -> Mirror | None:
    """What `checkpoint.url` asks for, if anything. Raises ValueError when it names no store."""
    return Mirror(spec, folder) if spec.checkpoint.url else None
