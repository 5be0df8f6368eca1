"""Ends processes with all that they have started, as far as Linux lets a user without privileges.

A process may leave its group and its session, but not its ancestors: below a subreaper, a process that loses its parent
becomes a child of the subreaper, so that it is found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
# For killed processes to end: one may wait for a disk, or be another user's.
_END_SECONDS, _LOOK_SECONDS = 5.0, 0.005


def die_with_parent() -> None:
    """Kill this process when the one that started it ends, also by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process a subreaper: the parent of all processes below it that lose theirs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The processes below one, without those that have ended."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The name, in brackets, may hold anything.
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def end_descendants(pid: int) -> None:
    """Kill what is below a process, until a look finds nothing more."""
    until = time.monotonic() + _END_SECONDS
    while (found := descendants(pid)) and time.monotonic() < until:
        for each in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if pid == os.getpid():
            _reap()
        time.sleep(_LOOK_SECONDS)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and what it has started."""
    if process.poll() is None:
        # It starts nothing more meanwhile.
        process.send_signal(signal.SIGSTOP)
        end_descendants(process.pid)
    # What has lost its parent where there is no subreaper, or since the process has ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
