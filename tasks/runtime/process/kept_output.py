"""Writes what a process prints to a file of its pod, too: its pod's log is gone when the pod is.

The lines of Python's standard output and standard error go to files in the folder that `KEPT_OUTPUT` names. The first
process of the pod copies them from there (`run_folder.kept_logs`), also those of a process that was killed: each line
is in its file before the next one is printed, with no pipe and no other process between. What native code writes to
its descriptors, such as NCCL, is in the pod's log alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_platform import kept_log, progress_line
from strata_platform.redact import redacted

VARIABLE = "STRATA_KEPT_OUTPUT"
"""Environment variable with the folder, which the first process of a pod makes and its processes inherit."""

# A file of a process is this large, and so many of them stay for who copies them.
SEGMENT_BYTES, SEGMENTS = 1 << 20, 8
# Characters of a line; what is longer, such as a dump of a tensor, is cut.
LONGEST = 4000


class OutputFile:
    """The files of a process: `<folder>/<pid>-<time>-<number>.jsonl`, numbered from 0, each of SEGMENT_BYTES.

    The time, in nanoseconds, tells processes apart that have the same pid one after the other.
    """

    def __init__(self, folder: Path, rank: Callable[[], int | None]) -> None:
        self._folder, self._rank_of = folder, rank
        # A signal's handler may print while its thread does.
        self._lock = threading.RLock()
        self._file, self._failed = -1, False
        self._begin()

    def _begin(self) -> None:
        self._pid, self._since = os.getpid(), time.time_ns()
        self._open(0)

    def _open(self, number: int) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._number, self._size = number, 0
        # An elastic agent, which has no rank, forks processes that have one.
        self._rank = _own_rank() if "TORCHELASTIC_RUN_ID" in os.environ else self._rank_of()
        self._file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if number >= SEGMENTS:
            self._path(number - SEGMENTS).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._pid}-{self._since}-{number:06d}.jsonl"

    def add(self, text: str) -> None:
        """Append a line. Never raises: an error is printed once, and nothing is kept from then on."""
        if self._failed or progress_line.decode(text) is not None:
            return
        try:
            with self._lock:
                if os.getpid() != self._pid:
                    # A fork, which shares the file with its parent.
                    self._begin()
                line = kept_log.entry(time.time(), self._rank, self._shown(text))
                if self._size + len(line) > SEGMENT_BYTES:
                    self._open(self._number + 1)
                self._size += os.write(self._file, line)
        except OSError as error:
            self._failed = True
            print(f"the rest of what this process prints is not kept: {error}", file=sys.stderr, flush=True)

    def _shown(self, text: str) -> str:
        # Other ranks than 0 begin the lines of their log with their rank, which is known here.
        text = text.removeprefix(f"[rank {self._rank}] ")
        if len(text) <= LONGEST:
            return redacted(text)
        text = text[:LONGEST]
        # Of half a URL it is not known where its password is. Not by a regular expression: its time grows with the
        # square of a line without spaces, and the process waits for it.
        for last in text.rsplit(maxsplit=1)[-1:]:
            if ":/" in last:
                text = text[: text.rindex(last)]
        return f"{redacted(text)} ..."

    def after_fork(self) -> None:
        """In a forked process: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            self._failed = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


class _Copied:
    """Puts the complete lines that are written to a stream into a file as well."""

    def __init__(self, stream: Any, file: OutputFile) -> None:
        self._stream, self._write, self._file = stream, stream.write, file
        # Each thread completes its own lines.
        self._begun = threading.local()
        self._own = getattr(stream, "__dict__", {}).get("write")
        # Of the object, and no other object in its place: handlers of logging, and libraries, hold on to the stream.
        stream.write = self.write

    def write(self, text: str) -> int:
        written: int = self._write(text)
        *lines, begun = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = begun.rpartition("\r")[2][: LONGEST + 1]
        for line in lines:
            # A progress bar is rewritten after carriage returns: its last state is kept.
            if line := line.rstrip("\r").rpartition("\r")[2].rstrip():
                self._file.add(line)
        return written

    def undo(self) -> None:
        if self._own is None:
            del self._stream.write
        else:
            self._stream.write = self._own


_CURRENT: list[OutputFile] = []


def _own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def keep_output(rank: Callable[[], int | None] = _own_rank) -> Callable[[], None]:
    """Begin to keep what this process prints, once, if the pod's first process has made a folder for it.

    Never raises: an error is printed. Returns a function that ends it.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or _CURRENT:
        return _nothing
    try:
        file = OutputFile(Path(folder), rank)
    except OSError as error:
        print(f"what this process prints is not kept: {error}", file=sys.stderr, flush=True)
        return _nothing
    _CURRENT.append(file)
    os.register_at_fork(after_in_child=file.after_fork)
    streams = []
    # Where both are one stream, its lines are kept once.
    for stream in {sys.stdout, sys.stderr} - {None}:
        try:
            streams.append(_Copied(stream, file))
        except AttributeError as error:
            # Neither Python's own streams nor those of the launcher.
            print(f"what this process prints to {type(stream).__name__} is not kept: {error}", file=sys.stderr)

    def end() -> None:
        for stream in streams:
            stream.undo()
        _CURRENT.clear()
        file.close()

    return end


def note(text: str) -> None:
    """Keep a text that this process does not print itself."""
    for file in _CURRENT:
        for line in text.splitlines():
            file.add(line)


def _nothing() -> None:
    return
