"""Where archives are kept: a folder, or an object store by its URL."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

UNFINISHED = ".part-"
"""How the name of a file begins that a writer did not finish."""


@dataclass(frozen=True)
class Blob:
    """A file of the store. `name` is its path below the root; `modified` is in seconds since the epoch."""

    name: str
    size: int
    modified: float


class Blobs(Protocol):
    """What a store is kept in. A name that is not there raises FileNotFoundError; any other trouble another OSError, or
    whatever the store's own client raises."""

    def list(self, prefix: str) -> list[Blob]:
        """Everything below a folder, at any depth; [] when there is no such folder."""

    def read(self, name: str) -> bytes:
        """The contents of a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file; a reader sees the old contents or the new, never a part."""

    def remove(self, name: str) -> None:
        """Remove a file."""


def open_blobs(url: str) -> Blobs:
    """A folder for a path or `file://...`, otherwise what fsspec knows by the URL's scheme, such as `s3://bucket/path`.

    Credentials are those of the scheme's own library: for S3 the environment, a profile or the pod's identity.

    Raises:
        ImportError: fsspec, or its library for this scheme, is not installed.
    """
    if "://" not in url or url.startswith("file://"):
        return Folder(Path(url.removeprefix("file://")))
    return Objects(url)


class Folder:
    """A folder of this machine, or one that it mounts."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self, prefix: str) -> list[Blob]:
        """As Blobs says."""
        return list(_walk(self._root, prefix))

    def read(self, name: str) -> bytes:
        """As Blobs says."""
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """As Blobs says."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """As Blobs says."""
        (self._root / name).unlink()


def _walk(root: Path, prefix: str) -> Iterator[Blob]:
    try:
        found = sorted(os.scandir(root / prefix), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, name)
        elif entry.is_file(follow_symlinks=False):
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            yield Blob(name, status.st_size, status.st_mtime)


class Objects:
    """An object store through fsspec, whose writes of a whole object are atomic in all of them."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                f"a store at {url} needs fsspec and its library for that scheme, such as s3fs; install them, or give a "
                "folder"
            ) from error
        # Other pods write at the same time: no listing may be remembered.
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")

    def list(self, prefix: str) -> list[Blob]:
        """As Blobs says."""
        found = self._fs.find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        return [
            Blob(path[len(self._root) + 1 :], info["size"], _modified(info)) for path, info in sorted(found.items())
        ]

    def read(self, name: str) -> bytes:
        """As Blobs says."""
        return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """As Blobs says."""
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """As Blobs says."""
        self._fs.rm_file(f"{self._root}/{name}")


def _modified(info: dict[str, Any]) -> float:
    """Libraries of fsspec name the time of the last write as their store does."""
    names = ("LastModified", "mtime", "updated", "last_modified")
    value = next((info[name] for name in names if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.timestamp()
    assert isinstance(value, int | float), f"no time of writing in {sorted(info)}"
    return float(value)
