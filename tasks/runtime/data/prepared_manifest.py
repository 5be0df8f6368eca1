"""What a prepared folder holds and how it came to be: `manifest.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.runtime.data.sources import is_commit
from tasks.runtime.run_folder import format_versions

MANIFEST = "manifest.json"
KIND = "prepared data"
VERSION = format_versions.DATA

SKIP_REASONS = {
    "invalid": "not readable or of the wrong type",
    "no_target": "without a token to learn",
    "overlong": "longer than a row",
}


@dataclass(frozen=True)
class Shard:
    """A file of rows, `sha256` being that of its tensors."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Counts of one split. `tokens` is without padding; `target_tokens` carry loss."""

    samples: int
    documents: int
    tokens: int
    target_tokens: int
    rows: int
    shards: tuple[Shard, ...]

    def fill(self, sequence_length: int) -> float:
        """Share of the rows' tokens that are not padding, when packed."""
        return self.tokens / (self.rows * sequence_length) if self.rows else 0.0


@dataclass(frozen=True)
class Manifest:
    """Every sample that was read is accounted for: `samples_read == samples_used + sum(skipped.values())`.

    `skipped` counts by the reasons of `SKIP_REASONS`. `truncated` samples and those cut into pieces (`split_long`) or
    into one document per turn (`split_turns`) are among the used. `stop_token_ids` are the tokens that end what a model
    writes. `largest_token_id` is of all tokens that rows have, padding and these ends included.
    """

    recipe: dict[str, Any]
    recipe_hash: str
    source: str
    format: str
    columns: tuple[str, ...]
    sequence_length: int
    packing: bool
    samples_read: int
    samples_used: int
    skipped: dict[str, int]
    truncated: int
    split_long: int
    split_turns: int
    train: Split
    validation: Split
    vocabulary_size: int
    largest_token_id: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    versions: dict[str, str]
    version: int = VERSION
    kind: str = KIND

    @property
    def content_hash(self) -> str:
        """Digest of the rows: the same for the same rows, however they came to be.

        A recipe does not tell: a template may print the date, and the next version of a tokenizer cut other tokens.
        """
        shards = (*self.train.shards, *self.validation.shards)
        parts = [f"{shard.file} {shard.rows} {shard.sha256}" for shard in shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def commit(self) -> str | None:
        """The commit of the Hub's data set that the rows are of, where they are of one and it is known."""
        revision = self.recipe["data"]["revision"]
        return revision if revision is not None and is_commit(revision) else None

    def write(self, folder: Path) -> None:
        """Write `manifest.json`."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError when the folder holds no prepared data, or some of another version, or not all of it."""
        values = _values(folder)
        if values is None:
            raise ValueError(f"{folder} holds no prepared data: there is no {MANIFEST} of it")
        if values["version"] != VERSION:
            raise ValueError(f"{folder} is not of version {VERSION}; prepare the data anew")
        for name in ("train", "validation"):
            values[name] = _split(values[name])
            for shard in values[name].shards:
                file = folder / shard.file
                if not file.is_file() or file.stat().st_size != shard.bytes:
                    raise ValueError(f"{file} is missing or not whole; remove {folder} and prepare the data anew")
        for name in ("columns", "stop_token_ids"):
            values[name] = tuple(values[name])
        return cls(**values)


def is_prepared(folder: Path) -> bool:
    """Whether the folder holds prepared data, of whichever version."""
    return _values(folder) is not None


def _values(folder: Path) -> dict[str, Any] | None:
    """What the manifest says, or None when there is none: other folders have a file of that name too."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return values if isinstance(values, dict) and values.get("kind") == KIND else None


def _split(values: dict[str, Any]) -> Split:
    return Split(**{**values, "shards": tuple(Shard(**shard) for shard in values["shards"])})
