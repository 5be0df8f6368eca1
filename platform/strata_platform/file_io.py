"""Files: read only if they have an end, replaced atomically, locked by one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_POLL_SECONDS = 0.2


class LockTimeout(Exception):
    """Another process still holds the lock."""


def require_regular_file(path: Path) -> None:
    """Raises OSError unless `path` is a file with contents of its own: a pipe or a device may never end.

    Raises:
        OSError: there is no such file, or it is a folder, a named pipe, a device or a socket.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        kind = kinds.get(stat.S_IFMT(mode), "a socket")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file; copy its contents to a file and name that", str(path))


def require_regular_files(folder: Path) -> None:
    """Raises OSError if an entry of `folder` is neither a file nor a folder; does nothing if there is no such folder.

    A dangling link is a missing file, for which the reader of the folder has a message of its own.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not path.is_dir():
            require_regular_file(path)


def folder_digest(folder: Path) -> str:
    """`sha256:` and the digest of the names and contents of the folder's Python files."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"


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


def open_store(url: str, **options: Any) -> tuple[Any, str]:
    """`fsspec.url_to_fs(url, **options)`: the client of a store, and the path in it."""
    # Imported here: most commands read no file, and the clients of stores take long to import.
    import fsspec

    files, path = fsspec.url_to_fs(url, **options)
    return files, path
