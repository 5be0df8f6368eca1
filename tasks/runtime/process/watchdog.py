"""Notice that training stands still: leave the stacks of all threads and end the process; the run is then continued.

A process that hangs holds up all others in their next collective, and none of them ends by itself for a long time. Each
process watches itself alone, and asks nobody: those that wait for the one that hangs make no step either, so all notice
at about the same time, whatever state the network is in.
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

log = logging.getLogger(__name__)

# What a process that hung ends with: EX_TEMPFAIL, try again.
EXIT_HUNG = 75
# What compiles, or waits for a file system, may take so many times as long as a step.
SLOW = 3.0
# Seconds that a process which noticed waits, at most, for the stacks of the others, and for the disk to take its own.
GATHER_SECONDS = 60.0
# How long a change of what is expected may go unnoticed.
TICK_SECONDS = 5.0
_STDERR = 2
_OURS = ("tasks.", "__main__")


class Watchdog:
    """Ends this process when what it is doing takes too long. Costs training one assignment a step."""

    def __init__(self, folder: Path, rank: int, world_size: int, limit: float) -> None:
        """`limit` is the seconds that a step may take, 0 for any; `folder` takes the stacks of all processes."""
        self._folder, self._rank, self._world_size, self._limit = folder, rank, world_size, limit
        self._expected = "nothing", math.inf, math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch, if it does not yet; nothing is expected."""
        if self._limit and not self._thread.is_alive():
            self._thread.start()

    def expect(self, what: str, patience: float = 1.0) -> None:
        """From now on this process is at `what`, which may take `patience` times the limit."""
        now = time.monotonic()
        # One assignment: the thread sees all of it or nothing.
        self._expected = what, now, now + patience * self._limit

    def close(self) -> None:
        """Stop watching."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _watch(self) -> None:
        while True:
            # Native code may hang with Python's lock held, and then this thread does not come back here. One that needs
            # no lock leaves the stacks instead, and an alarm that no Python code handles ends the process.
            faulthandler.dump_traceback_later(2 * self._limit, file=_STDERR)
            signal.setitimer(signal.ITIMER_REAL, 2 * self._limit + 1)
            if self._closed.wait(min(self._limit / 2, TICK_SECONDS, max(0.0, self._expected[2] - time.monotonic()))):
                return
            what, since, until = self._expected
            if time.monotonic() >= until:
                self._give_up(what, time.monotonic() - since)

    def _give_up(self, what: str, seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, GATHER_SECONDS + 5)
        frames = sys._current_frames()
        where = _place(frames[threading.main_thread().ident or 0])
        # First to where no file system can hold it up.
        log.error("%s is not done after %.0f s; this process is at %s. All of its threads:", what, seconds, where)
        faulthandler.dump_traceback(file=_STDERR)
        leave = threading.Thread(target=self._leave, args=(what, seconds, where), daemon=True)
        leave.start()
        leave.join(GATHER_SECONDS)
        os._exit(EXIT_HUNG)

    def _leave(self, what: str, seconds: float, where: str) -> None:
        """Write this process's stacks, wait for those of the others, and tell who is where."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".rank-{self._rank}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(f"{where}\n\n{what} is not done after {seconds:.0f} s, says process {self._rank}, ")
            file.write(f"{os.getpid()} on {socket.gethostname()}\n\n")
            file.flush()
            faulthandler.dump_traceback(file=file)
        temporary.replace(self._folder / f"rank-{self._rank}.txt")
        deadline = time.monotonic() + GATHER_SECONDS * 0.8
        files = self._await("rank-*.txt", self._world_size, deadline)
        places = {
            int(file.stem.removeprefix("rank-")): file.read_text(encoding="utf-8").partition("\n")[0] for file in files
        }
        # One process tells for all of them, and none ends before: its end would be an error in those that wait for it.
        if min(places) == self._rank:
            said = f"{what} is not done: {summary(places, self._world_size)}. Stacks are in {self._folder}"
            log.error(said)
            (self._folder / "summary.txt").write_text(f"{said}\n", encoding="utf-8")
        self._await("summary.txt", 1, deadline)

    def _await(self, pattern: str, number: int, deadline: float) -> list[Path]:
        """The files of that name, as soon as there are so many, or at the deadline."""
        while len(files := list(self._folder.glob(pattern))) < number and time.monotonic() < deadline:
            time.sleep(0.1)
        return files


def summary(places: dict[int, str], world_size: int) -> str:
    """Who is where, the fewest first: what one process alone is at is what the others wait for.

    >>> summary({0: "all_reduce", 1: "read", 2: "all_reduce"}, 4)
    'process 1 is at read; processes 0, 2 are at all_reduce; no word of process 3'
    """
    by_place = defaultdict(list)
    for rank in sorted(places):
        by_place[places[rank]].append(rank)
    said = [
        f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'} at {place}"
        for place, ranks in sorted(by_place.items(), key=lambda item: len(item[1]))
    ]
    silent = [rank for rank in range(world_size) if rank not in places]
    return "; ".join(said + ([f"no word of {_named(silent)}"] if silent else []))


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def _place(frame: FrameType) -> str:
    """The function that a thread is in, and the innermost one of the runtime that called it."""
    ours: FrameType | None = frame
    while ours is not None and not _module(ours).startswith(_OURS):
        ours = ours.f_back
    return _line(frame) if ours is None or ours is frame else f"{_line(frame)}, called by {_line(ours)}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _line(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{frame.f_lineno}"
