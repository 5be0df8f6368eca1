"""The place of prepared shards and of the records of their parts: a folder, or one in an object store.

A part counts as prepared once its record is written, which is after its shards. So whatever is killed, a part is
complete or absent, and two processes that prepare the same part write the same bytes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from strata_platform.file_io import write_atomic
from tasks.runtime.process.errors import Unreachable
from tasks.runtime.process.object_store_url import open_url

log = logging.getLogger(__name__)

FIELD = "data.prepared_url"
# Seconds before each further attempt.
_WAITS = (1, 2, 4, 8, 16)
# Errors that another attempt does not mend.
_REFUSALS = (PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, ValueError)


class ShardStore:
    """Files by name, in a folder or under a URL.

    In a folder, its methods raise the errors of the system. With a URL they raise Unreachable when the store has not
    answered for half a minute, and ValueError when it refuses, as without permission.
    """

    def __init__(self, place: Path | str) -> None:
        """Raises ValueError when no client is installed for a URL's scheme, or it rejects the URL."""
        self.place = str(place)
        self.folder = Path(place) if isinstance(place, Path) else None
        self._filesystem: Any = None
        if self.folder is None:
            self._filesystem, self._root = open_url(self.place.rstrip("/"), FIELD)

    def read(self, name: str) -> bytes | None:
        """The contents of a file, None without it."""
        try:
            if self.folder is not None:
                return (self.folder / name).read_bytes()
            return bytes(self._call(lambda: self._filesystem.cat_file(f"{self._root}/{name}")))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; a reader sees all of it or none."""
        if self.folder is not None:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / name, data, durable=False)
        else:
            self._write(name, lambda path: self._filesystem.pipe_file(path, data))

    def put(self, path: Path) -> None:
        """Move a file of this machine here, under the name that it has."""
        if self.folder is not None:
            os.replace(path, self.folder / path.name)
        else:
            self._write(path.name, lambda place: self._filesystem.put_file(str(path), place))
            path.unlink()

    def get(self, name: str, path: Path) -> None:
        """Copy a file to `path` on this machine. Raises FileNotFoundError when it is missing."""
        self._call(lambda: self._filesystem.get_file(f"{self._root}/{name}", str(path)))

    def put_folder(self, folder: Path, name: str) -> None:
        """Copy a folder of this machine here."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def get_folder(self, name: str, folder: Path) -> None:
        """Copy a folder to this machine."""
        root = f"{self._root}/{name}/"
        for path in self._call(lambda: self._filesystem.find(root)):
            target = folder / path.partition(root)[2]
            target.parent.mkdir(parents=True, exist_ok=True)
            self._call(partial(self._filesystem.get_file, path, str(target)))

    def clear(self) -> None:
        """Delete all that is here."""
        self._filesystem.invalidate_cache()
        if self._call(lambda: self._filesystem.exists(self._root)):
            self._call(lambda: self._filesystem.rm(self._root, recursive=True))

    def names(self, folder: str) -> set[str]:
        """Names of the files in a folder; empty when there is none."""
        if self.folder is not None:
            return set(os.listdir(self.folder / folder)) if (self.folder / folder).is_dir() else set()
        self._filesystem.invalidate_cache()
        try:
            found = self._call(lambda: self._filesystem.ls(f"{self._root}/{folder}", detail=False))
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rsplit("/", 1)[-1] for path in found}

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        path = f"{self._root}/{name}"

        def call() -> None:
            # Object stores have no folders; file systems such as NFS behind a URL do.
            self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

        try:
            self._call(call)
        except FileNotFoundError as error:
            # The bucket, for example.
            raise ValueError(f"{FIELD}: {self.place} cannot be written: {error}") from error

    def _call(self, call: Callable[[], Any]) -> Any:
        """`call()`, again after a while if the store does not answer. Raises FileNotFoundError as it is."""
        for wait in (*_WAITS, None):
            try:
                return call()
            except FileNotFoundError:
                raise
            # The clients' errors have no common base class.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, _REFUSALS) or "Credentials" in type(error).__name__:
                    raise ValueError(f"{FIELD}: {self.place} cannot be used: {reason}") from error
                if wait is None:
                    raise Unreachable(
                        f"{FIELD}: {self.place} cannot be reached: {reason}. Start again when it can: parts that are "
                        "prepared stay"
                    ) from error
                log.warning("%s cannot be reached (%s); trying again in %d s", self.place, reason, wait)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")
