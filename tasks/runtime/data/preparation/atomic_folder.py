"""Atomic creation of a folder: complete or absent, also after a kill and with concurrent writers.

The folder is written under a temporary name next to its target and then renamed. A file lock makes a second preparation
wait for the first and use its result. On a file system without locks both prepare, and the first rename wins.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from strata_platform.file_io import acquire_lock
from tasks.runtime.data.prepared_manifest import is_prepared

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def folder_lock(target: Path) -> Iterator[None]:
    """Hold the lock of the folder `target`; the kernel releases it when the process ends.

    Creates the folder that `target` is in. Deletes temporary folders that killed preparations on this machine left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "a", encoding="utf-8") as file:
        try:
            acquire_lock(file)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{target.parent} does not support file locks; concurrent preparations do the work twice", stacklevel=3
            )
        else:
            for path in target.parent.iterdir():
                if path.name.startswith(_build_prefix(target)):
                    shutil.rmtree(path, ignore_errors=True)
        yield


@contextmanager
def atomic_folder(target: Path, *, is_usable: Callable[[], bool]) -> Iterator[Path]:
    """Yield a new folder, renamed to `target` at the end of the block and deleted if the block fails.

    is_usable: whether a folder that another process put at `target` meanwhile may stay; otherwise it is replaced.

    Raises:
        ValueError: `target` has files that are no prepared data.
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
    """Raise ValueError when `target` has files that are no prepared data."""
    if target.exists() and not is_prepared(target) and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} has other files in it; give a new or an empty folder for the prepared data")


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
    # With the host's name: without locks across machines, another machine's temporary folder may be in use.
    return f".{target.name}.{socket.gethostname()}-"
