"""Make a folder appear whole or not at all, also when its maker is killed, or has a rival.

The folder is built beside its place and renamed into it. A lock on a file beside it lets a second preparation wait for
the first and then use its result; where the file system has no locks, both build and the first to rename wins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tasks.runtime.data.prepared_manifest import is_prepared

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def folder_lock(target: Path) -> Iterator[None]:
    """Hold the lock of `target`. The lock is the process's: it goes when the process does, however that ends.

    Leftovers of killed preparations of this machine are removed on the way.
    """
    with open(target.parent / f".{target.name}.lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{target.parent} has no file locks; preparations at the same time do the work twice", stacklevel=3
            )
        else:
            for path in target.parent.iterdir():
                if path.name.startswith(_build_prefix(target)):
                    shutil.rmtree(path, ignore_errors=True)
        yield


@contextmanager
def atomic_folder(target: Path, *, is_usable: Callable[[], bool]) -> Iterator[Path]:
    """A new folder that takes its place when the block ends, and vanishes when it fails.

    `is_usable` tells whether what is in the place by then is as good; it is kept. Prepared data that is not is replaced.

    Raises:
        ValueError: something that is no prepared data is in the place.
    """
    require_replaceable(target)
    folder = _build_folder(target)
    folder.mkdir()
    try:
        yield folder
        while not _try_rename(folder, target):
            if is_usable():
                return
            require_replaceable(target)
            old = _build_folder(target)
            os.rename(target, old)
            shutil.rmtree(old)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_replaceable(target: Path) -> None:
    """Raise ValueError when `target` holds files that are no prepared data."""
    if target.exists() and not is_prepared(target) and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} holds other files; give a new or an empty folder for the prepared data")


def _try_rename(folder: Path, target: Path) -> bool:
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _build_folder(target: Path) -> Path:
    return target.parent / f"{_build_prefix(target)}{uuid4().hex[:8]}"


def _build_prefix(target: Path) -> str:
    # With the machine's name: another machine's folder may be in use where locks do not reach across.
    return f".{target.name}.{socket.gethostname()}-"
