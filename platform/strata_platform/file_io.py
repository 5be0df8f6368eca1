"""Files that several processes share: replaced atomically, locked by one writer at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.2


class LockTimeout(Exception):
    """Another process still holds the lock."""


def write_atomic(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace the file `path` by one that holds `data`; a reader sees the old file or the new one, never a part.

    With `durable` the new file also survives a power cut once this returns, for which the disk is waited for.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def acquire_lock(file: IO[str], *, timeout: float | None = None, on_wait: Callable[[], None] | None = None) -> None:
    """Take the exclusive lock (`flock`) of an open file, held until the file is closed or the process ends.

    Args:
        timeout: seconds to wait for the process that holds it; None waits without limit.
        on_wait: called once, before the first wait.

    Raises:
        LockTimeout: another process holds the lock after `timeout` seconds.
        OSError: the file system has no locks.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline is not None and time.monotonic() >= deadline:
                raise LockTimeout(file.name) from None
        if on_wait is not None:
            on_wait()
            on_wait = None
        if deadline is None:
            fcntl.flock(file, fcntl.LOCK_EX)
            return
        time.sleep(_POLL_SECONDS)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
