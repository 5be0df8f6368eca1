"""Read, check, write and move the entries of Triton's cache directory.

The directory has a folder per key. A kernel's folder holds the files of its compilation and a group file,
`__grp__<name>.json`. Triton writes the group file last. It contains the absolute paths of the other files; if it is
missing, or one of its paths is wrong, Triton compiles again. Triton looks up launchers, the driver helper and
autotuning results by name, without a group file.

Triton does not validate files: one that a crashed machine left incomplete breaks the run that reads it. So this module
writes a digest file with the SHA-256 of an entry's files. `load` only returns valid files. An entry written by Triton
has no digest file; `load` then checks the consistency of the files.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..files import write_atomically

GROUP = "__grp__"
DIGESTS = "__strata__.json"
"""The digest file of an entry."""

UNGROUPED = (".so", ".autotune.json")
"""Suffixes of the files that Triton looks up by name, without a group file."""

_ELF = (".so", ".cubin", ".hsaco")
# SHT_NOBITS: an ELF section that takes no space in the file.
_NO_BITS = 8

Files = dict[str, bytes]
"""An entry's files by name. In memory a group file holds names instead of paths, so equal entries have equal bytes."""


_INCOMPLETE = "it has no group file: its compilation did not finish"


class CorruptEntry(ValueError):
    """An entry must not be used; the message says why."""


def keys(directory: Path) -> list[str]:
    """The keys in a cache directory, sorted; [] if the directory does not exist."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))


def entry_key(digest: bytes) -> str:
    """The folder name for a SHA-256 of Triton, such as `hash` in a kernel's metadata."""
    return base64.b32encode(digest).decode().rstrip("=")


def load(directory: Path, key: str) -> Files | None:
    """Read and check an entry; None if there is none or its compilation did not finish.

    Raises:
        CorruptEntry: a file is missing or truncated, or does not match its digest or the key.
    """
    files = _read_folder(directory / key)
    if not _is_complete(files):
        return None
    groups = {name: _with_names_only(data) for name, data in files.items() if name.startswith(GROUP)}
    if groups:
        # Other files are left over from an earlier compilation.
        wanted = {DIGESTS, *(child for data in groups.values() for child in _children(data))}
        files = {name: files[name] for name in files if name in wanted} | groups
    check(key, files)
    return files


def check(key: str, files: Mapping[str, bytes]) -> None:
    """Check an entry's files against its key, its digests and each other. Raises CorruptEntry."""
    if not _is_complete(files):
        raise CorruptEntry(_INCOMPLETE)
    _check_digests(files)
    for name, data in files.items():
        if name.startswith(GROUP):
            children = _children(data)
            missing = sorted(children.keys() - files.keys())
            if missing or not children:
                raise CorruptEntry(f"{name} lists {', '.join(missing) or 'no file'}, which does not exist")
            _check_key(key, name.removeprefix(GROUP), files)
        elif not data:
            raise CorruptEntry(f"{name} is empty")
        elif name.endswith(_ELF):
            check_elf(name, data)


def store(directory: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Write an entry and its digests; safe with concurrent readers and writers of the entry.

    Each file is written atomically, and the group file, which makes the entry valid, last.

    Raises OSError if the directory cannot be written.
    """
    folder = Path(os.path.abspath(directory)) / key
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: data for name, data in files.items() if name != DIGESTS and not name.startswith(GROUP)}
    with locked_entry(directory, key):
        # Otherwise an old group file would refer to a mix of old and new files.
        _empty_groups(folder)
        for name, data in contents.items():
            write_atomically(folder / name, data)
        write_digests(directory, key, contents)
        for name, data in files.items():
            if name.startswith(GROUP):
                write_atomically(folder / name, _group({child: str(folder / child) for child in _children(data)}))


@contextmanager
def locked_entry(directory: Path, key: str) -> Iterator[None]:
    """Lock an entry against other threads and processes that store or invalidate it.

    On file systems without locks for folders, such as NFS, this does nothing. Raises OSError if the key has no folder.
    """
    folder = os.open(directory / key, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def add_digests(directory: Path, key: str) -> None:
    """Write the digest file of an entry that this process has just compiled.

    Raises:
        CorruptEntry: the entry is not valid.
        OSError: the directory cannot be written.
    """
    files = load(directory, key)
    if files is None:
        raise CorruptEntry(_INCOMPLETE)
    write_digests(directory, key, files)


def write_digests(directory: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Write the digest file for `files`. Call it before the file that makes the entry valid is written."""
    write_atomically(directory / key / DIGESTS, _digest_file(files))


def relocate(directory: Path) -> int:
    """Update the paths in all group files after the directory was moved or copied; returns the number of changed files.

    An entry with missing files is not changed; Triton compiles it again.
    """
    return sum(relocate_entry(directory, key) for key in keys(directory))


def relocate_entry(directory: Path, key: str) -> int:
    """`relocate` for one entry."""
    folder = Path(os.path.abspath(directory)) / key
    changed = 0
    for name, data in _groups(folder).items():
        try:
            children = _children(data)
        except CorruptEntry:
            continue
        here = {child: str(folder / child) for child in children}
        if here != children and all((folder / child).is_file() for child in children):
            write_atomically(folder / name, _group(here))
            changed += 1
    return changed


def invalidate(directory: Path, key: str) -> None:
    """Make Triton compile a corrupt entry again. An entry that another process has repaired meanwhile is not changed.

    The digest file stays, so that a process that is currently reading the entry still finds it corrupt.

    Raises OSError if the directory cannot be written.
    """
    folder = directory / key
    with locked_entry(directory, key):
        try:
            load(directory, key)
        except CorruptEntry:
            _empty_groups(folder)
            for name in os.listdir(folder):
                # If such a file is missing, Triton builds it.
                if name.endswith(UNGROUPED):
                    (folder / name).unlink(missing_ok=True)


def _empty_groups(folder: Path) -> None:
    """Make group files list no files, a cache miss. Removing one could make a concurrent lookup by Triton fail."""
    for name, data in _groups(folder).items():
        if data != _group({}):
            write_atomically(folder / name, _group({}))


def _groups(folder: Path) -> Files:
    return {name: data for name, data in _read_folder(folder).items() if name.startswith(GROUP)}


def _read_folder(folder: Path) -> Files:
    """Read the files of a folder, except those that disappear meanwhile, such as a writer's temporary files."""
    files = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for name in names:
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
    return files


def _is_complete(files: Mapping[str, bytes]) -> bool:
    """Whether Triton would use the entry: a group file lists files, or all files need none."""
    groups = [data for name, data in files.items() if name.startswith(GROUP)]
    if groups:
        return any(data != _group({}) for data in groups)
    names = files.keys() - {DIGESTS}
    return bool(names) and all(name.endswith(UNGROUPED) for name in names)


def _children(group: bytes) -> dict[str, str]:
    """The paths in a group file by name. Raises CorruptEntry."""
    try:
        children = json.loads(group)["child_paths"]
        if all(isinstance(path, str) and os.path.basename(name) == name for name, path in children.items()):
            return dict(children)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise CorruptEntry("its group file is not valid")


def _group(children: Mapping[str, str]) -> bytes:
    return json.dumps({"child_paths": dict(children)}).encode()


def _with_names_only(group: bytes) -> bytes:
    return _group({name: name for name in _children(group)})


def _digest_file(files: Mapping[str, bytes]) -> bytes:
    digests = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in sorted(files.items())
        if name != DIGESTS and not name.startswith(GROUP)
    }
    return json.dumps({"sha256": digests}).encode()


def _check_digests(files: Mapping[str, bytes]) -> None:
    if DIGESTS not in files:
        return
    try:
        digests = dict(json.loads(files[DIGESTS])["sha256"])
    except (ValueError, TypeError, KeyError):
        raise CorruptEntry("its digest file is not valid") from None
    for name, digest in digests.items():
        if name not in files:
            raise CorruptEntry(f"{name} is missing")
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise CorruptEntry(f"{name} does not match its digest")
    extra = [name for name in files if name != DIGESTS and not name.startswith(GROUP) and name not in digests]
    if extra:
        raise CorruptEntry(f"{', '.join(extra)} has no digest")


def _check_key(key: str, metadata: str, files: Mapping[str, bytes]) -> None:
    """A kernel's metadata contains the hash that names its folder."""
    try:
        digest = bytes.fromhex(json.loads(files[metadata])["hash"])
    except (ValueError, TypeError, KeyError):
        raise CorruptEntry(f"{metadata} is not a kernel's metadata") from None
    if entry_key(digest) != key:
        raise CorruptEntry(f"{metadata} belongs to another kernel")


def check_elf(name: str, data: bytes) -> None:
    """Raise CorruptEntry unless a 64-bit little-endian ELF file is as long as its headers say."""
    try:
        if data[:6] != b"\x7fELF\x02\x01":
            raise CorruptEntry(f"{name} is not an ELF file")
        at = struct.unpack_from("<QQ", data, 0x20)
        size, number, section_size, sections = struct.unpack_from("<HHHH", data, 0x36)
        ends = [at[0] + size * number, at[1] + section_size * sections]
        for i in range(sections):
            kind, offset, length = struct.unpack_from("<4xI16xQQ", data, at[1] + section_size * i)
            ends.append(offset + (0 if kind == _NO_BITS else length))
    except struct.error:
        raise CorruptEntry(f"{name} is truncated") from None
    if max(ends) > len(data):
        raise CorruptEntry(f"{name} is truncated: {len(data)} of {max(ends)} bytes")
