"""Watchdog of the training loop: when a step hangs, it writes all threads' stacks and ends the process.

A process that hangs blocks all others in their next collective, where they wait for a long time. Each process watches
itself only and needs no network: the ranks that wait for the hanging one make no step either, so all watchdogs fire at
about the same time. The elastic agent then restarts the workers.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

from strata_platform.outcomes import HUNG

log = logging.getLogger(__name__)

# Activities that compile, or that wait for a file system, get this multiple of the timeout of a step.
SLOW_FACTOR = 3.0
# Longest wait, in seconds, for the other ranks' stacks and for the disk to take this rank's own.
GATHER_TIMEOUT = 60.0
# The watchdog's thread reads the deadline at least this often.
POLL_SECONDS = 5.0
_STDERR = 2
_OWN_MODULES = ("tasks.", "__main__")


class Watchdog:
    """Ends this process when its current activity takes too long. It costs training one assignment a step."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        """timeout: seconds that a step may take; 0 disables the watchdog. folder: for the stacks of all ranks."""
        self._folder, self._rank, self._world_size, self._timeout = folder, rank, world_size, timeout
        self._expected = "nothing", math.inf, math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the watching thread, unless it runs already. No deadline is set until `expect` is called."""
        if self._timeout and not self._thread.is_alive():
            self._thread.start()

    def expect(self, activity: str, factor: float = 1.0) -> None:
        """Set the current activity, which may take `factor` times the timeout from now on."""
        now = time.monotonic()
        # A single assignment: the thread never sees a part of it.
        self._expected = activity, now, now + factor * self._timeout

    def close(self) -> None:
        """Stop watching."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _watch(self) -> None:
        while True:
            # Native code may hang while it holds the GIL; then this thread does not run again. faulthandler's thread,
            # which needs no GIL, writes the stacks instead, and SIGALRM, which has no Python handler, ends the process.
            faulthandler.dump_traceback_later(2 * self._timeout, file=_STDERR)
            signal.setitimer(signal.ITIMER_REAL, 2 * self._timeout + 1)
            if self._closed.wait(min(self._timeout / 2, POLL_SECONDS, max(0.0, self._expected[2] - time.monotonic()))):
                return
            activity, since, until = self._expected
            if time.monotonic() >= until:
                self._exit_hung(activity, time.monotonic() - since)

    def _exit_hung(self, activity: str, seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, GATHER_TIMEOUT + 5)
        frames = sys._current_frames()
        location = _location(frames[threading.main_thread().ident or 0])
        # First to the console, which no file system can block.
        log.error(
            "%s is not done after %.0f s; this process is at %s. All of its threads:", activity, seconds, location
        )
        faulthandler.dump_traceback(file=_STDERR)
        writer = threading.Thread(target=self._write_stacks, args=(activity, seconds, location), daemon=True)
        writer.start()
        writer.join(GATHER_TIMEOUT)
        os._exit(HUNG.exit_code)

    def _write_stacks(self, activity: str, seconds: float, location: str) -> None:
        """Write this process's stacks and wait for the other ranks'; the lowest rank that hangs logs a summary."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".rank-{self._rank}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(f"{location}\n\n{activity} is not done after {seconds:.0f} s on rank {self._rank}, ")
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file)
        temporary.replace(self._folder / f"rank-{self._rank}.txt")
        deadline = time.monotonic() + GATHER_TIMEOUT * 0.8
        files = self._wait_for_files("rank-*.txt", self._world_size, deadline)
        locations = {
            int(file.stem.removeprefix("rank-")): file.read_text(encoding="utf-8").partition("\n")[0] for file in files
        }
        # No process ends before the summary is written: its end would raise an error in the ranks that wait for it.
        if min(locations) == self._rank:
            message = f"{activity} is not done: {summary(locations, self._world_size)}. Stacks are in {self._folder}"
            log.error(message)
            (self._folder / "summary.txt").write_text(f"{message}\n", encoding="utf-8")
        self._wait_for_files("summary.txt", 1, deadline)

    def _wait_for_files(self, pattern: str, number: int, deadline: float) -> list[Path]:
        """Files that match `pattern`: as soon as there are `number` of them, or at the deadline."""
        while len(files := list(self._folder.glob(pattern))) < number and time.monotonic() < deadline:
            time.sleep(0.1)
        return files


def summary(locations: dict[int, str], world_size: int) -> str:
    """Ranks by location, the smallest group first: the others usually wait for the rank that is alone somewhere.

    >>> summary({0: "all_reduce", 1: "read", 2: "all_reduce"}, 4)
    'process 1 is at read; processes 0, 2 are at all_reduce; process 3 did not report'
    """
    ranks_at = defaultdict(list)
    for rank in sorted(locations):
        ranks_at[locations[rank]].append(rank)
    parts = [
        f"{_format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {location}"
        for location, ranks in sorted(ranks_at.items(), key=lambda item: len(item[1]))
    ]
    missing = [rank for rank in range(world_size) if rank not in locations]
    return "; ".join(parts + ([f"{_format_ranks(missing)} did not report"] if missing else []))


def _format_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def _location(frame: FrameType) -> str:
    """The function a thread is in, and the innermost function of the runtime that called it."""
    own: FrameType | None = frame
    while own is not None and not _module(own).startswith(_OWN_MODULES):
        own = own.f_back
    return (
        _format_frame(frame)
        if own is None or own is frame
        else f"{_format_frame(frame)}, called by {_format_frame(own)}"
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _format_frame(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{frame.f_lineno}"
