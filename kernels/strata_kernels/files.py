"""Hashes of source files, and atomic writes."""

from __future__ import annotations

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path


@cache
def source_hash(folder: Path) -> str:
    """SHA-256 of the Python files in a folder, or of one file."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder.parent)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see either the old or the new contents."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
