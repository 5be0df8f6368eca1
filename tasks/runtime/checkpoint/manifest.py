"""Checkpoints that are whole or do not count.

A step's folder is filled by all processes, then one process writes `manifest.json` with the size and SHA-256 of every
file: the checkpoint exists from that rename on. A folder without a manifest is what a killed save left; a folder whose
files differ from its manifest is damaged. Both are passed over, never loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks.runtime.run_folder import format_versions
from tasks.runtime.run_folder.record import write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"

# What a manifest has of itself.
_CHECKSUM = "seal"


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was taken, from its name."""
    return int(folder.name.removeprefix(PREFIX))


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, whole or not, oldest first."""
    return sorted((p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()), key=step_of)


def commit(folder: Path, written: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Declare the checkpoint whole. Call on one process, after every process has written its files.

    `written` has the size and SHA-256 of the files whose writers told them; the others are read. `metadata` are noted.
    """
    others = [p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST]
    found = {str(p.relative_to(folder)): p for p in others}
    with ThreadPoolExecutor() as pool:
        read = pool.map(_fsync_and_digest, (path for name, path in found.items() if name not in written))
        files = written | dict(zip((name for name in found if name not in written), read, strict=True))
    _write_manifest(
        folder,
        {
            "format": format_versions.CHECKPOINT,
            "step": step_of(folder),
            **metadata,
            "files": dict(sorted(files.items())),
        },
    )
    # The rename itself must survive a power cut, too, and so must the folder: older ones are removed next.
    for changed in (folder, folder.parent):
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def verification_error(folder: Path) -> str | None:
    """Why the checkpoint cannot be used, or None when it is whole."""
    if not (folder / MANIFEST).exists():
        return "its save did not finish"
    files = parse_files((folder / MANIFEST).read_bytes())
    if files is None:
        return f"{MANIFEST} is unreadable, or has changed since it was written"
    for name, expected in files.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _digest(folder / name), files)
        changed = [name for name, digest in zip(files, digests, strict=True) if digest != files[name]["sha256"]]
    return f"{changed[0]} has changed since it was written" if changed else None


def metadata_of(folder: Path) -> dict[str, Any]:
    """What the manifest of a whole checkpoint notes of its run.

    Raises ValueError when it was written by a version of Strata whose checkpoints cannot be read by this one.
    """
    manifest = _read_manifest(folder)
    if manifest.get("format") != format_versions.CHECKPOINT:
        raise ValueError(
            f"{folder} has checkpoint format {manifest.get('format', 1)}, this version of Strata reads "
            f"{format_versions.CHECKPOINT}; finish that run with the version that began it, or choose another name"
        )
    return manifest


def update_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Change what the manifest of a whole checkpoint notes of its run."""
    _write_manifest(folder, {**_read_manifest(folder), **metadata})


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint; warns about every newer one that is not."""
    for folder in reversed(folders(root)):
        reason = verification_error(folder)
        if reason is None:
            return folder
        log.warning("checkpoint %s is not used: %s", folder, reason)
    return None


def discard_after(root: Path, step: int) -> None:
    """Remove folders of later steps: what a killed or damaged save left must not mix with the next one."""
    for folder in folders(root):
        if step_of(folder) > step:
            shutil.rmtree(folder)


def parse_files(manifest: bytes) -> dict[str, Any] | None:
    """The files that the text of a manifest names; None when it is torn, or is not what was written."""
    try:
        value = dict(json.loads(manifest))
        files = dict(value["files"])
    except (ValueError, KeyError, TypeError):
        return None
    # Earlier versions wrote none.
    return files if value.get(_CHECKSUM) in (None, _checksum(value)) else None


def read_files(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of each file of a whole checkpoint but the manifest, by name."""
    return dict(_read_manifest(folder)["files"])


def to_prune(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Which checkpoints go, given the steps of all of them in order: the last ones stay, and those of every so many.

    >>> expendable([2, 4, 6, 8, 10], keep_last=2, keep_every=4)
    [2, 6]
    """
    return [step for step in steps[:-keep_last] if not (keep_every and step % keep_every == 0)]


def prune(root: Path, keep_last: int, keep_every: int | None = None, *, keep: Path | None = None) -> None:
    """Keep the newest checkpoints, those of every so many steps, and `keep`.

    Call after `commit`: a whole one always exists. One that cannot be removed is tried again the next time: a file that
    somebody reads over the network, say.
    """
    by_step = {step_of(folder): folder for folder in folders(root)}
    for step in to_prune(list(by_step), keep_last, keep_every):
        folder = by_step[step]
        if folder == keep:
            continue
        try:
            # Without its manifest a half-removed folder is no checkpoint.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", folder, error)


def _write_manifest(folder: Path, value: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, {**value, _CHECKSUM: _checksum(value)})


def _checksum(manifest: dict[str, Any]) -> str:
    """A digest of what a manifest says, however it is laid out: training continues by that as much as by tensors."""
    said = json.dumps({name: value for name, value in manifest.items() if name != _CHECKSUM})
    return hashlib.sha256(json.dumps(json.loads(said), sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _fsync_and_digest(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
