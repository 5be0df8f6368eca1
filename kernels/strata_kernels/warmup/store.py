"""A store of compiled code that pods share: an archive for each entry of Triton's cache, and one for the graphs that
`torch.compile` makes for a run.

    <root>/<environment>/<key>/<SHA-256 of the archive>-<signature>.tar.gz

The environment is what all keys of a process have in common; a kernel's key is Triton's own. An archive is named after
its contents, so writing one is never wrong, whoever writes it and however often, and a reader knows a torn one. None is
ever changed; when the store is larger than it may be, those that were not used for longest are removed.

**What is in an archive is run**: kernels on the GPU, and shared objects in the process, as its user. Whoever can write
to the store can do what the pods can. With a signing key, which readers and writers share, nothing else is accepted
than what was signed with it; without one nothing is accepted, unless that is allowed in so many words.
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
from .blob_storage import UNFINISHED, Blob, Blobs

UNSIGNED = "unsigned"

_NAME = re.compile(rf"([0-9a-f]{{64}})-([0-9a-f]{{64}}|{UNSIGNED})\.tar\.gz")
# What one entry may come to.
_MOST_BYTES = 256 << 20
# How old the mark of the last use may be before it is renewed.
_FRESH = 24 * 3600.0


class Refused(ValueError):
    """An archive that must not be used; the message says why."""


@dataclass(frozen=True)
class Kind:
    """What an archive may hold.

    check: raises `triton_cache.Damaged` for files that do not belong together, or not to the key.
    most_files: how many.
    folders: whether files may lie in folders.
    """

    check: Callable[[str, Mapping[str, bytes]], None]
    most_files: int
    folders: bool


# Real ones have ten files and a megabyte.
KERNELS = Kind(triton_cache.check, most_files=100, folders=False)


@dataclass
class Store:
    """Archives of one environment, and what is known of them.

    blobs: where they are kept.
    environment: the folder of this process's archives, from `environment.describe`.
    signing_key: signs what is pushed; what it has not signed is refused.
    allow_unsigned: without a key, accept what nobody signed.
    size_limit: bytes that the whole store may take.
    kind: what is in its archives.
    trusted: accept them whatever their signature, as for what lies on this machine anyway.
    """

    blobs: Blobs
    environment: str
    signing_key: bytes | None = None
    allow_unsigned: bool = False
    size_limit: int = 10 << 30
    kind: Kind = KERNELS
    trusted: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    """Archives that were refused, by name, with the reasons."""

    def __post_init__(self) -> None:
        if self.signing_key is None and not self.allow_unsigned and not self.trusted:
            raise ValueError("a store needs a signing key; or allow unsigned archives, and let nobody else write to it")
        # Archives whose mark of use is to be renewed.
        self._old: dict[str, bytes] = {}

    def pull(self, key: str) -> triton_cache.Files | None:
        """The files of an entry; None when the store has none that may be used. Raises what the blobs raise."""
        for blob in self._of(key):
            try:
                data = self._read(key, blob)
                files = unpack(key, data, self.kind)
            except FileNotFoundError:
                # Removed since, to make room.
                continue
            except Refused as reason:
                self.refused[blob.name] = str(reason)
                continue
            if time.time() - blob.modified > _FRESH:
                self._old[blob.name] = data
            return files
        return None

    def push(self, key: str, files: Mapping[str, bytes]) -> bool:
        """Add an entry; False when the store has it already, from another pod. Raises what the blobs raise."""
        if any(blob.name not in self.refused and self._signed(key, blob.name) for blob in self._of(key)):
            return False
        data = pack(key, files)
        # One of this name that was refused was torn: it is replaced.
        self.blobs.write(self._name(key, data), data)
        return True

    def replace(self, key: str, files: Mapping[str, bytes]) -> None:
        """Add an entry in place of what the store has for its key. Raises what the blobs raise."""
        old = [blob.name for blob in self._of(key) if self._signed(key, blob.name)]
        data = pack(key, files)
        self.blobs.write(name := self._name(key, data), data)
        for other in old:
            if other != name:
                with suppress(FileNotFoundError):
                    self.blobs.remove(other)

    def refusals(self) -> list[str]:
        """What was refused and why, for a person to read."""
        return [f"refused {name} from the store: {reason}" for name, reason in self.refused.items()]

    def renew(self) -> None:
        """Mark what was pulled as used, once a day, by writing it again: stores keep the time of writing alone."""
        while self._old:
            self.blobs.write(*self._old.popitem())

    def trim(self) -> int:
        """Remove what was not used for longest until the store is within its limit; returns how many archives."""
        # Nothing else than its own, should the root be somebody's bucket.
        ours = [blob for blob in self.blobs.list("") if _is_ours(blob.name)]
        blobs = sorted(ours, key=lambda blob: blob.modified)
        over = sum(blob.size for blob in blobs) - self.size_limit
        removed = 0
        for blob in blobs:
            if over <= 0:
                break
            # Another pod trims, too.
            with suppress(FileNotFoundError):
                self.blobs.remove(blob.name)
                removed += 1
            over -= blob.size
        return removed

    def _of(self, key: str) -> list[Blob]:
        """Archives of a key, the newest first."""
        blobs = self.blobs.list(f"{self.environment}/{key}")
        ours = [blob for blob in blobs if _NAME.fullmatch(blob.name.rpartition("/")[2])]
        return sorted(ours, key=lambda blob: blob.modified, reverse=True)

    def _name(self, key: str, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        return f"{self.environment}/{key}/{digest}-{self._signature(key, digest)}.tar.gz"

    def _signature(self, key: str, digest: str) -> str:
        if self.signing_key is None:
            return UNSIGNED
        # What is signed is that this archive may be used for this key in this environment.
        statement = f"strata kernels 1\n{self.environment}\n{key}\n{digest}"
        return hmac.new(self.signing_key, statement.encode(), hashlib.sha256).hexdigest()

    def _signed(self, key: str, name: str) -> bool:
        matched = _NAME.fullmatch(name.rpartition("/")[2])
        assert matched is not None
        return self.trusted or hmac.compare_digest(matched[2], self._signature(key, matched[1]))

    def _read(self, key: str, blob: Blob) -> bytes:
        """The archive as it was pushed. Raises Refused."""
        if not self._signed(key, blob.name):
            unsigned = f"-{UNSIGNED}." in blob.name
            raise Refused("it is not signed" if unsigned else "it is signed with another key, or none is known here")
        if blob.size > _MOST_BYTES:
            raise Refused(f"it has {blob.size} bytes")
        data = self.blobs.read(blob.name)
        if not blob.name.rpartition("/")[2].startswith(hashlib.sha256(data).hexdigest()):
            raise Refused("its SHA-256 is not the one in its name")
        return data


def _is_ours(name: str) -> bool:
    name = name.rpartition("/")[2]
    return _NAME.fullmatch(name) is not None or name.startswith(UNFINISHED)


def pack(key: str, files: Mapping[str, bytes]) -> bytes:
    """An archive of an entry; equal entries give equal bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            # Another one is made where the entry is unpacked.
            if name != triton_cache.SEAL:
                member = tarfile.TarInfo(f"{key}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), 6, mtime=0)


def unpack(key: str, data: bytes, kind: Kind = KERNELS) -> triton_cache.Files:
    """The files of an archive, in memory: nothing is written, so no name in it can lead anywhere.

    Raises:
        Refused: it is no archive, holds something else than plain files of this key, or they are damaged.
    """
    try:
        inflate = zlib.decompressobj(wbits=31)
        packed = inflate.decompress(data, _MOST_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise Refused("it is cut, more than one archive, or inflates to too much")
        files: triton_cache.Files = {}
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for member in archive:
                folder, _, name = member.name.partition("/")
                plain = member.type == tarfile.REGTYPE and not member.pax_headers and not member.issparse()
                parts = name.split("/") if kind.folders else [name]
                named = all(part and "/" not in part and not part.startswith(".") for part in parts)
                if folder != key or not named or not plain:
                    raise Refused(f"it holds {member.name!r}, which is no plain file of this entry")
                if name in files or len(files) == kind.most_files:
                    raise Refused("it holds a file twice, or too many")
                content = archive.extractfile(member)
                assert content is not None
                files[name] = content.read()
        kind.check(key, files)
    except (zlib.error, tarfile.TarError, EOFError, OSError) as error:
        raise Refused(f"it is no archive ({error})") from error
    except triton_cache.Damaged as damage:
        raise Refused(str(damage)) from damage
    return files
