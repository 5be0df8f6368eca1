"""The manifest of a checkpoint: commit, verify, find the latest, update metadata, prune.

All ranks write their files into the folder of a step. Then rank 0 writes `manifest.json`, with the size and SHA-256 of
every file; the checkpoint is complete from that rename on. A folder without a manifest was left by a save that was
killed, and a folder whose files differ from its manifest is corrupt. Neither is ever loaded.
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

BEST_STEP = "best_step"
"""Key of the step whose checkpoint is kept because it is the best."""

# Key of the manifest's checksum of itself.
_CHECKSUM = "seal"


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was saved, from the folder's name."""
    return int(folder.name.removeprefix(PREFIX))


def folders(root: Path) -> list[Path]:
    """All checkpoint folders, complete or not, oldest first."""
    return sorted((p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()), key=step_of)


def commit(folder: Path, digests: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write the manifest, which makes the checkpoint complete. Call it on rank 0 when all ranks have written.

    digests: size and SHA-256 of files whose writers computed them; all other files are read and digested here.
    metadata: further entries of the manifest.
    """
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST]
    missing = {name: path for path in paths if (name := str(path.relative_to(folder))) not in digests}
    with ThreadPoolExecutor() as pool:
        computed = pool.map(_fsync_and_digest, missing.values())
        files = digests | dict(zip(missing, computed, strict=True))
    _write_manifest(
        folder,
        {
            "format": format_versions.CHECKPOINT,
            "step": step_of(folder),
            **metadata,
            "files": dict(sorted(files.items())),
        },
    )
    # The rename and the folder's own entry must survive a power cut, too: older checkpoints are deleted next.
    for directory in (folder, folder.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def verification_error(folder: Path) -> str | None:
    """Why the checkpoint cannot be used, or None when it is complete. Reads and digests every file."""
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
    """Metadata in the manifest of a complete checkpoint.

    Raises ValueError when a version of Strata wrote it whose checkpoints this version cannot read.
    """
    manifest = _read_manifest(folder)
    if manifest.get("format") != format_versions.CHECKPOINT:
        raise ValueError(
            f"{folder} has checkpoint format {manifest.get('format', 1)}, but this version of Strata reads format "
            f"{format_versions.CHECKPOINT}; finish that run with the version that started it, or choose another name"
        )
    return manifest


def update_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Set entries of the metadata of a complete checkpoint."""
    _write_manifest(folder, {**_read_manifest(folder), **metadata})


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, or None; warns about every newer one that is incomplete or corrupt."""
    for folder in reversed(folders(root)):
        reason = verification_error(folder)
        if reason is None:
            return folder
        log.warning("checkpoint %s is not used: %s", folder, reason)
    return None


def newest_step(root: Path) -> int:
    """The step of the newest checkpoint whose save finished; 0 without one."""
    return max((step_of(folder) for folder in folders(root) if (folder / MANIFEST).exists()), default=0)


def discard_after(root: Path, step: int) -> None:
    """Delete checkpoints of later steps, so that files of an incomplete save do not mix with the next one's."""
    for folder in folders(root):
        if step_of(folder) > step:
            shutil.rmtree(folder)


def parse_files(manifest: bytes) -> dict[str, Any] | None:
    """Size and SHA-256 of the files in a manifest's text, by name; None when it is truncated or was changed."""
    try:
        value = dict(json.loads(manifest))
        files = dict(value["files"])
    except (ValueError, KeyError, TypeError):
        return None
    # Earlier versions wrote no checksum.
    return files if value.get(_CHECKSUM) in (None, _checksum(value)) else None


def read_files(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of the files of a complete checkpoint, without the manifest, by name."""
    return dict(_read_manifest(folder)["files"])


def best_step(root: Path) -> int | None:
    """The step whose checkpoint is kept because it is the best, by the newest manifest; None if there is none."""
    for folder in reversed(folders(root)):
        try:
            step: int | None = _read_manifest(folder).get(BEST_STEP)
            return step
        except (OSError, ValueError):
            # Incomplete or corrupt: the one before counts.
            continue
    return None


def to_prune(steps: Sequence[int], keep_last: int, keep_every: int | None, best: int | None = None) -> list[int]:
    """Steps whose checkpoints are deleted, given all steps in order.

    The last `keep_last` checkpoints stay, those whose step is a multiple of `keep_every`, and `best`.

    >>> to_prune([2, 4, 6, 8, 10], keep_last=2, keep_every=4)
    [2, 6]
    >>> to_prune([2, 4, 6, 8, 10], keep_last=2, keep_every=None, best=4)
    [2, 6]
    """
    return [step for step in steps[:-keep_last] if not (keep_every and step % keep_every == 0) and step != best]


def prune(root: Path, keep_last: int, keep_every: int | None = None, *, keep: Path | None = None) -> None:
    """Delete all checkpoints but the last `keep_last`, those of every `keep_every` steps, the best one, and `keep`.

    Call it after `commit`, so that a complete checkpoint always exists. If a checkpoint cannot be deleted, for example
    because another machine reads it over NFS, the next call tries again.
    """
    by_step = {step_of(folder): folder for folder in folders(root)}
    for step in to_prune(list(by_step), keep_last, keep_every, best_step(root)):
        folder = by_step[step]
        if folder == keep:
            continue
        try:
            # The manifest first: without it, a folder that is only half deleted is no checkpoint.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("the old checkpoint %s could not be deleted: %s", folder, error)


def _write_manifest(folder: Path, value: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, {**value, _CHECKSUM: _checksum(value)})


def _checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest's values, independent of their layout: resuming depends on them as much as on tensors."""
    values = json.dumps({name: value for name, value in manifest.items() if name != _CHECKSUM})
    # Through JSON, which turns tuples into lists and keys into strings.
    return hashlib.sha256(json.dumps(json.loads(values), sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))


def _fsync_and_digest(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
