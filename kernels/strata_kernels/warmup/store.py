"""A store of compiled code that pods share: archives of Triton's cache entries and of Inductor's compiled graphs.

    <root>/<environment>/<key>/<SHA-256 of the archive>-<signature>.tar.gz

The environment consists of the inputs common to all keys of a process. The key of a kernel is Triton's. An archive's
name contains its SHA-256, so concurrent writers cannot conflict, and a reader detects a truncated file. Archives do not
change. When the store exceeds its size limit, the least recently used archives are removed.

**Pods execute what is in an archive**: kernels on the GPU, and shared objects in the process, as its user. Whoever can
write to the store can do whatever the pods can. With a signing key, which readers and writers share, the store accepts
only archives that were signed with it. Without one it accepts none, unless `allow_unsigned` is set.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import io
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from . import triton_cache
from .blob_storage import PARTIAL_PREFIX, Blob, BlobStorage

UNSIGNED = "unsigned"

_NAME = re.compile(rf"([0-9a-f]{{64}})-([0-9a-f]{{64}}|{UNSIGNED})\.tar\.gz")
# Maximum uncompressed bytes of an entry.
_MAX_BYTES = 256 << 20
# Age in seconds at which a used archive's modification time is refreshed.
_REFRESH_AFTER = 24 * 3600.0


class RejectedArchive(ValueError):
    """An archive must not be used; the message says why."""


@dataclass(frozen=True)
class ArchiveKind:
    """The rules for the contents of an archive.

    check: called with the key and the files; raises `triton_cache.CorruptEntry` if they do not match.
    max_files: the largest number of files.
    subfolders: whether files may be in subfolders.
    """

    check: Callable[[str, Mapping[str, bytes]], None]
    max_files: int
    subfolders: bool


# Typical: ten files, 1 MB.
KERNELS = ArchiveKind(triton_cache.check, max_files=100, subfolders=False)


@dataclass
class Store:
    """The archives of one environment.

    storage: a folder or an object store.
    environment: the folder of this process's archives, from `environment.environment` or `graph_cache.environment`.
    signing_key: signs pushed archives; archives without its signature are rejected.
    allow_unsigned: without a key, accept unsigned archives.
    size_limit: bytes of the store, all environments included.
    kind: rules for the contents of its archives.
    trusted: accept any signature, for a folder on this machine.
    """

    storage: BlobStorage
    environment: str
    signing_key: bytes | None = None
    allow_unsigned: bool = False
    size_limit: int = 10 << 30
    kind: ArchiveKind = KERNELS
    trusted: bool = False
    rejected: dict[str, str] = field(default_factory=dict)
    """Reasons for the rejected archives, by name."""

    def __post_init__(self) -> None:
        if self.signing_key is None and not self.allow_unsigned and not self.trusted:
            raise ValueError("a store needs a signing key; or allow unsigned archives, and restrict who can write")
        # Used archives whose modification time has to be refreshed.
        self._stale: dict[str, bytes] = {}

    def pull(self, key: str) -> triton_cache.Files | None:
        """Read an entry; None if the store has no acceptable archive of it. Raises errors of the storage."""
        for blob in self._of(key):
            try:
                data = self._read(key, blob)
                files = unpack(key, data, self.kind)
            except FileNotFoundError:
                # Another pod has trimmed the store meanwhile.
                continue
            except RejectedArchive as reason:
                self.rejected[blob.name] = str(reason)
                continue
            if time.time() - blob.modified > _REFRESH_AFTER:
                self._stale[blob.name] = data
            return files
        return None

    def push(self, key: str, files: Mapping[str, bytes]) -> bool:
        """Add an entry; False if the store has it, e.g. from another pod. Raises errors of the storage."""
        if any(blob.name not in self.rejected and self._signed(key, blob.name) for blob in self._of(key)):
            return False
        data = pack(key, files)
        # A rejected archive of the same name was truncated; this replaces it.
        self.storage.write(self._name(key, data), data)
        return True

    def replace(self, key: str, files: Mapping[str, bytes]) -> None:
        """Add an entry and remove the other archives of its key. Raises errors of the storage."""
        previous = [blob.name for blob in self._of(key) if self._signed(key, blob.name)]
        data = pack(key, files)
        self.storage.write(name := self._name(key, data), data)
        for other in previous:
            if other != name:
                with suppress(FileNotFoundError):
                    self.storage.remove(other)

    def rejections(self) -> list[str]:
        """A message for each rejected archive."""
        return [f"the store's archive {name} is rejected: {reason}" for name, reason in self.rejected.items()]

    def refresh_used(self) -> None:
        """Rewrite used archives, at most once a day: object stores only record the time of the last write."""
        while self._stale:
            self.storage.write(*self._stale.popitem())

    def trim(self) -> int:
        """Remove the least recently used archives until the store is within its limit; returns their number."""
        # The bucket may contain other files.
        ours = [blob for blob in self.storage.list("") if _is_ours(blob.name)]
        blobs = sorted(ours, key=lambda blob: blob.modified)
        over = sum(blob.size for blob in blobs) - self.size_limit
        removed = 0
        for blob in blobs:
            if over <= 0:
                break
            # Another pod may trim at the same time.
            with suppress(FileNotFoundError):
                self.storage.remove(blob.name)
                removed += 1
            over -= blob.size
        return removed

    def _of(self, key: str) -> list[Blob]:
        """The archives of a key, newest first."""
        blobs = self.storage.list(f"{self.environment}/{key}")
        ours = [blob for blob in blobs if _NAME.fullmatch(blob.name.rpartition("/")[2])]
        return sorted(ours, key=lambda blob: blob.modified, reverse=True)

    def _name(self, key: str, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        return f"{self.environment}/{key}/{digest}-{self._signature(key, digest)}.tar.gz"

    def _signature(self, key: str, digest: str) -> str:
        if self.signing_key is None:
            return UNSIGNED
        # The signature covers key and environment, so an archive cannot be moved to another key.
        statement = f"strata kernels 1\n{self.environment}\n{key}\n{digest}"
        return hmac.new(self.signing_key, statement.encode(), hashlib.sha256).hexdigest()

    def _signed(self, key: str, name: str) -> bool:
        matched = _NAME.fullmatch(name.rpartition("/")[2])
        assert matched is not None
        return self.trusted or hmac.compare_digest(matched[2], self._signature(key, matched[1]))

    def _read(self, key: str, blob: Blob) -> bytes:
        """Read and verify an archive. Raises RejectedArchive."""
        if not self._signed(key, blob.name):
            unsigned = f"-{UNSIGNED}." in blob.name
            raise RejectedArchive("it is not signed" if unsigned else "it is signed with a key that this process lacks")
        if blob.size > _MAX_BYTES:
            raise RejectedArchive(f"it has {blob.size} bytes, more than {_MAX_BYTES}")
        data = self.storage.read(blob.name)
        if not blob.name.rpartition("/")[2].startswith(hashlib.sha256(data).hexdigest()):
            raise RejectedArchive("its SHA-256 differs from the one in its name")
        return data


def _is_ours(name: str) -> bool:
    name = name.rpartition("/")[2]
    return _NAME.fullmatch(name) is not None or name.startswith(PARTIAL_PREFIX)


def pack(key: str, files: Mapping[str, bytes]) -> bytes:
    """Archive an entry; equal entries give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            # `triton_cache.store` writes a new one.
            if name != triton_cache.DIGESTS:
                member = tarfile.TarInfo(f"{key}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), 6, mtime=0)


def unpack(key: str, data: bytes, kind: ArchiveKind = KERNELS) -> triton_cache.Files:
    """Read an archive into memory. It writes no file, so a malicious path in the archive has no effect.

    Raises:
        RejectedArchive: it is not an archive, contains anything but regular files of this key, or they are corrupt.
    """
    try:
        inflate = zlib.decompressobj(wbits=31)
        packed = inflate.decompress(data, _MAX_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise RejectedArchive("it is truncated, has trailing data, or is too large uncompressed")
        files: triton_cache.Files = {}
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.partition("/")
                plain = member.type == tarfile.REGTYPE and not member.pax_headers and not member.issparse()
                parts = name.split("/") if kind.subfolders else [name]
                allowed = all(part and "/" not in part and not part.startswith(".") for part in parts)
                if folder != key or not allowed or not plain:
                    raise RejectedArchive(f"it contains {member.name!r}, which is not a regular file of this entry")
                if name in files or len(files) == kind.max_files:
                    raise RejectedArchive("it contains a file twice, or too many files")
                content = archive.extractfile(member)
                assert content is not None
                files[name] = content.read()
        kind.check(key, files)
    except (zlib.error, tarfile.TarError, EOFError, OSError) as error:
        raise RejectedArchive(f"it is not an archive ({error})") from error
    except triton_cache.CorruptEntry as error:
        raise RejectedArchive(str(error)) from error
    return files
