"""Storage for archives: a folder, or an object store given by its URL."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

PARTIAL_PREFIX = ".part-"
"""Name prefix of files whose write has not finished, or was interrupted."""


@dataclass(frozen=True)
class Blob:
    """A file. `name` is its path relative to the root; `modified` is in seconds since the epoch."""

    name: str
    size: int
    modified: float


class BlobStorage(Protocol):
    """The operations that a store needs.

    A missing name raises FileNotFoundError, any other failure another OSError or an error of the storage's client.
    """

    def list(self, prefix: str) -> list[Blob]:
        """All files below a folder, recursively; [] if the folder does not exist."""

    def read(self, name: str) -> bytes:
        """Read a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file atomically."""

    def remove(self, name: str) -> None:
        """Remove a file."""


def open_storage(url: str) -> BlobStorage:
    """Open a folder for a path or `file://...`, otherwise an object store through fsspec, such as `s3://bucket/path`.

    The library of the scheme finds the credentials: for S3 in the environment, a profile or the pod's identity.

    Raises:
        ImportError: fsspec, or its library for this scheme, is not installed.
    """
    if "://" not in url or url.startswith("file://"):
        return FolderStorage(Path(url.removeprefix("file://")))
    return ObjectStorage(url)


class FolderStorage:
    """A local or mounted folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self, prefix: str) -> list[Blob]:
        """See BlobStorage."""
        return list(_walk(self._root, prefix))

    def read(self, name: str) -> bytes:
        """See BlobStorage."""
        return (self._root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """See BlobStorage."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{PARTIAL_PREFIX}{secrets.token_hex(8)}")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """See BlobStorage."""
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


class ObjectStorage:
    """An object store through fsspec. Object stores write objects atomically."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"a store at {url} needs fsspec and its library for that scheme, such as s3fs; install them, or use a "
                "folder"
            ) from error
        # Other pods write at the same time, so fsspec must not cache listings.
        self._fs, root = _url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")

    def list(self, prefix: str) -> list[Blob]:
        """See BlobStorage."""
        found = self._fs.find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        return [
            Blob(path[len(self._root) + 1 :], info["size"], _modified(info)) for path, info in sorted(found.items())
        ]

    def read(self, name: str) -> bytes:
        """See BlobStorage."""
        return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """See BlobStorage."""
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        """See BlobStorage."""
        self._fs.rm_file(f"{self._root}/{name}")


def _url_to_fs(url: str, **options: Any) -> tuple[Any, str]:
    """`fsspec.core.url_to_fs(url, **options)`, by fsspec's own client of the scheme.

    Some libraries, e.g. the SDK of Flyte 2 on import, register obstore's clients instead of s3fs and gcsfs, which
    reject these options.
    """
    from fsspec import core
    from fsspec.registry import get_filesystem_class, known_implementations

    scheme = url.partition("://")[0]
    if not get_filesystem_class(scheme).__module__.startswith("obstore."):
        return core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    module, _, name = known_implementations[scheme]["class"].rpartition(".")
    client = getattr(import_module(module), name)
    return client(**client._get_kwargs_from_urls(url), **options), str(client._strip_protocol(url))


def _modified(info: dict[str, Any]) -> float:
    """The time of the last write; its key differs between the libraries of fsspec."""
    names = ("LastModified", "mtime", "updated", "last_modified")
    value = next((info[name] for name in names if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.timestamp()
    assert isinstance(value, int | float), f"no modification time in {sorted(info)}"
    return float(value)
