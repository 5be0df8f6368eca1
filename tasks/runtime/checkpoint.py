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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.runtime.record import write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was taken, from its name."""
    return int(folder.name.removeprefix(PREFIX))


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, whole or not, oldest first."""
    return sorted((p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()), key=step_of)


def commit(folder: Path, *, spec_hash: str, data_hash: str, world_size: int) -> None:
    """Declare the checkpoint whole. Call on one process, after every process has written its files."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_sync_and_digest, files))
    write_json(
        folder / MANIFEST,
        {
            "step": step_of(folder),
            "spec_hash": spec_hash,
            "data_hash": data_hash,
            "world_size": world_size,
            "files": {
                str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": digest}
                for file, digest in zip(files, digests, strict=True)
            },
        },
    )
    # The rename itself must survive a power cut, too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: Path) -> str | None:
    """Why the checkpoint cannot be used, or None when it is whole."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return "its save did not finish"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
        return f"{MANIFEST} is unreadable"
    for name, expected in files.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
        if _digest(file) != expected["sha256"]:
            return f"{name} has changed since it was written"
    return None


def data_of(folder: Path) -> str:
    """Which data a whole checkpoint was trained on: the hash of their recipe."""
    return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("data_hash"))


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint; warns about every newer one that is not."""
    for folder in reversed(folders(root)):
        reason = damage(folder)
        if reason is None:
            return folder
        log.warning("checkpoint %s is not used: %s", folder, reason)
    return None


def discard_after(root: Path, step: int) -> None:
    """Remove folders of later steps: what a killed or damaged save left must not mix with the next one."""
    for folder in folders(root):
        if step_of(folder) > step:
            shutil.rmtree(folder)


def prune(root: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints. Call after `commit`, so that a whole one always exists."""
    for folder in folders(root)[:-keep]:
        # Without its manifest a half-removed folder is no checkpoint.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _sync_and_digest(file: Path) -> str:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return _digest(file)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
