"""What Triton's cache directory holds, as data: read it, check it, write it, move it.

The directory has a folder per key. A kernel's folder holds the files of its compilation and a group file,
`__grp__<name>.json`, which Triton writes last and which names the others by their absolute paths: without it, or with
one path that leads nowhere, Triton compiles again. Launchers, the driver's helper and the choices of the autotuner are
looked up by name, without a group file.

Triton believes what it finds. A file that a crashed machine left half written breaks the run that reads it. So an entry
written here has a seal beside its files, their SHA-256, and `load` returns nothing that it has not checked: against the
seal, or, in an entry that Triton alone has written, as far as its files can show by themselves that they are whole.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

GROUP = "__grp__"
SEAL = "__strata__.json"

ALONE = (".so", ".autotune.json")
"""Ends of the names of files that Triton looks up by name, without a group."""

_ELF = (".so", ".cubin", ".hsaco")
# Type of an ELF section that takes no room in the file.
_NO_BITS = 8

Files = dict[str, bytes]
"""An entry's files by name. The paths in its group file are names, too, so that equal entries are equal bytes."""


class Damaged(ValueError):
    """An entry that must not be used; the message says why."""


def keys(directory: Path) -> list[str]:
    """The keys that a cache directory has folders for, sorted; [] for a directory that is not there."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))


def key_of(digest: bytes) -> str:
    """The name of the folder for a SHA-256 of Triton's, such as the `hash` of a kernel's metadata."""
    return base64.b32encode(digest).decode().rstrip("=")


def load(directory: Path, key: str) -> Files | None:
    """The files of an entry, checked; None where there is none, or one whose compilation never ended.

    Raises:
        Damaged: a file is missing, cut, or not what the seal or the key says.
    """
    files = _read(directory / key)
    if not _names_an_entry(files):
        return None
    groups = {name: _with_names(data) for name, data in files.items() if name.startswith(GROUP)}
    if groups:
        # What an earlier, other compilation left is not of this entry.
        wanted = {SEAL, *(child for data in groups.values() for child in _children(data))}
        files = {name: files[name] for name in files if name in wanted} | groups
    check(key, files)
    return files


def check(key: str, files: Mapping[str, bytes]) -> None:
    """Hold the files of an entry against its key, its seal and each other. Raises Damaged."""
    if not _names_an_entry(files):
        raise Damaged("it has no group file: its compilation did not end")
    _check_seal(files)
    for name, data in files.items():
        if name.startswith(GROUP):
            children = _children(data)
            missing = sorted(children.keys() - files.keys())
            if missing or not children:
                raise Damaged(f"{name} names {', '.join(missing) or 'no file'}, which is not there")
            _check_key(key, name.removeprefix(GROUP), files)
        elif not data:
            raise Damaged(f"{name} is empty")
        elif name.endswith(_ELF):
            check_elf(name, data)


def store(directory: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Write an entry with its seal. Readers and other writers of the same entry may be at work: every file appears
    whole, and the group file, which makes the entry count, last.

    Raises OSError where the directory takes no more.
    """
    folder = Path(os.path.abspath(directory)) / key
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: data for name, data in files.items() if name != SEAL and not name.startswith(GROUP)}
    with changing(directory, key):
        # New files must not count one by one, by an old group.
        _empty_groups(folder)
        for name, data in contents.items():
            _replace(folder / name, data)
        write_seal(directory, key, contents)
        for name, data in files.items():
            if name.startswith(GROUP):
                _replace(folder / name, _group({child: str(folder / child) for child in _children(data)}))


@contextmanager
def changing(directory: Path, key: str) -> Iterator[None]:
    """While the context is open, no other thread or process that asks for the same stores or invalidates the entry.

    Raises OSError for a key without a folder. Where the file system has no locks for folders, as NFS has none, nobody
    is held up.
    """
    folder = os.open(directory / key, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def seal(directory: Path, key: str) -> None:
    """Vouch for an entry as it is now; for whoever has just made it. Raises Damaged, and OSError where it cannot."""
    files = load(directory, key)
    if files is None:
        raise Damaged("it has no group file: its compilation did not end")
    write_seal(directory, key, files)


def write_seal(directory: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Vouch for these files of an entry, also before they make one: before the group file, or a file of no group, is
    written.
    """
    _replace(directory / key / SEAL, _seal(files))


def relocate(directory: Path) -> int:
    """Let every group file name the files beside it, after the directory was moved or copied; returns how many changed.

    An entry whose files are not all there stays as it is: to Triton it is a miss.
    """
    return sum(relocate_entry(directory, key) for key in keys(directory))


def relocate_entry(directory: Path, key: str) -> int:
    """As `relocate`, one entry."""
    folder = Path(os.path.abspath(directory)) / key
    changed = 0
    for name, data in _groups(folder).items():
        try:
            children = _children(data)
        except Damaged:
            continue
        here = {child: str(folder / child) for child in children}
        if here != children and all((folder / child).is_file() for child in children):
            _replace(folder / name, _group(here))
            changed += 1
    return changed


def invalidate(directory: Path, key: str) -> None:
    """Make a damaged entry a miss; one that others have mended meanwhile stays, for they may be about to open it. The
    seal stays, or another process that is reading just now would take torn files for ones that nobody has sealed.

    Raises OSError where the directory cannot be written.
    """
    folder = directory / key
    with changing(directory, key):
        try:
            load(directory, key)
        except Damaged:
            _empty_groups(folder)
            for name in os.listdir(folder):
                # Triton takes one that is gone for one that does not load: it builds it.
                if name.endswith(ALONE):
                    (folder / name).unlink(missing_ok=True)


def _empty_groups(folder: Path) -> None:
    """Triton looks for a group file before it opens it: an empty one is a miss, one that is gone by then an error."""
    for name, data in _groups(folder).items():
        if data != _group({}):
            _replace(folder / name, _group({}))


def _groups(folder: Path) -> Files:
    return {name: data for name, data in _read(folder).items() if name.startswith(GROUP)}


def repair(directory: Path) -> dict[str, str]:
    """Mend the entries whose files moved, and make every damaged one a miss; returns the damages by key.

    Raises OSError where the directory cannot be written and has to be.
    """
    relocate(directory)
    damages = {}
    for key in keys(directory):
        try:
            load(directory, key)
        except Damaged as damage:
            invalidate(directory, key)
            damages[key] = str(damage)
    return damages


def _read(folder: Path) -> Files:
    """The files of a folder. What vanishes while it is read, as the temporary files of a writer do, is not there."""
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


def _names_an_entry(files: Mapping[str, bytes]) -> bool:
    """Whether Triton could find something: a group that was not emptied, or files that need none."""
    groups = [data for name, data in files.items() if name.startswith(GROUP)]
    if groups:
        return any(data != _group({}) for data in groups)
    names = files.keys() - {SEAL}
    return bool(names) and all(name.endswith(ALONE) for name in names)


def _children(group: bytes) -> dict[str, str]:
    """Name to path, from a group file. Raises Damaged."""
    try:
        children = json.loads(group)["child_paths"]
        if all(isinstance(path, str) and os.path.basename(name) == name for name, path in children.items()):
            return dict(children)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise Damaged("its group file is not one")


def _group(children: Mapping[str, str]) -> bytes:
    return json.dumps({"child_paths": dict(children)}).encode()


def _with_names(group: bytes) -> bytes:
    return _group({name: name for name in _children(group)})


def _seal(files: Mapping[str, bytes]) -> bytes:
    digests = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in sorted(files.items())
        if name != SEAL and not name.startswith(GROUP)
    }
    return json.dumps({"sha256": digests}).encode()


def _check_seal(files: Mapping[str, bytes]) -> None:
    if SEAL not in files:
        return
    try:
        digests = dict(json.loads(files[SEAL])["sha256"])
    except (ValueError, TypeError, KeyError):
        raise Damaged("its seal is not one") from None
    for name, digest in digests.items():
        if name not in files:
            raise Damaged(f"{name} is not there")
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise Damaged(f"{name} is not what was sealed")
    extra = [name for name in files if name != SEAL and not name.startswith(GROUP) and name not in digests]
    if extra:
        raise Damaged(f"{', '.join(extra)} is not sealed")


def _check_key(key: str, metadata: str, files: Mapping[str, bytes]) -> None:
    """Triton keeps in a kernel's metadata the hash that its folder is named after."""
    try:
        digest = bytes.fromhex(json.loads(files[metadata])["hash"])
    except (ValueError, TypeError, KeyError):
        raise Damaged(f"{metadata} is not a kernel's metadata") from None
    if key_of(digest) != key:
        raise Damaged(f"{metadata} is of another kernel")


def check_elf(name: str, data: bytes) -> None:
    """Nothing that the header of a 64-bit little-endian ELF file speaks of may be beyond the end of the file."""
    try:
        if data[:6] != b"\x7fELF\x02\x01":
            raise Damaged(f"{name} is not an ELF file")
        at = struct.unpack_from("<QQ", data, 0x20)
        size, number, section_size, sections = struct.unpack_from("<HHHH", data, 0x36)
        ends = [at[0] + size * number, at[1] + section_size * sections]
        for i in range(sections):
            kind, offset, length = struct.unpack_from("<4xI16xQQ", data, at[1] + section_size * i)
            ends.append(offset + (0 if kind == _NO_BITS else length))
    except struct.error:
        raise Damaged(f"{name} is cut") from None
    if max(ends) > len(data):
        raise Damaged(f"{name} is cut: {len(data)} of {max(ends)} bytes")


def _replace(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
