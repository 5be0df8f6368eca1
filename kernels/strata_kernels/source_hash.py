"""A hash of Python files, by which what was made from them is found again."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_hash(folder: Path) -> str:
    """A hash of the Python files in a folder, or of one file."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder.parent)} {len(text)}\n".encode() + text)
    return digest.hexdigest()
