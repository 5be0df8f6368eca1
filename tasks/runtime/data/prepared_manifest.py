"""`manifest.json` of prepared data: the recipe, the counts of samples and tokens, the shards and their digests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from strata_platform.file_io import write_atomic
from tasks.runtime.data.reading.sources import is_commit
from tasks.runtime.run_folder import format_versions

MANIFEST = "manifest.json"
KIND = "prepared data"
PLAN = "plan.json"
PLAN_KIND = "plan of prepared data"
SOURCES = "sources.json"
SOURCES_KIND = "sources of prepared data"
VERSION = format_versions.DATA

SKIP_REASONS = {
    "invalid": "not readable or of the wrong type",
    "no_target": "without a token that carries loss",
    "overlong": "longer than a row",
    "image_size": "with an image of fewer pixels than data.image_min_pixels",
    "audio_length": "with an audio that is shorter or longer than allowed",
}


class Sample(NamedTuple):
    """A prompt, its completion in the data, and the prompt's token ids as in training, for generation.

    media: images or audio of the prompt, the bytes of each in base 64.
    """

    prompt: str
    completion: str
    prompt_ids: list[int]
    media: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """A file of rows; `sha256` is the digest of its tensors."""

    file: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Counts of one split. `tokens` excludes padding; `target_tokens` carry loss; `media` are the images or audio
    of all rows.
    """

    samples: int
    documents: int
    tokens: int
    target_tokens: int
    rows: int
    shards: tuple[Shard, ...]
    media: int = 0

    def __add__(self, other: Split) -> Split:
        """Both splits together; their samples are assumed to differ."""
        return Split(*(getattr(self, name) + getattr(other, name) for name in Split.__dataclass_fields__))

    def fill(self, sequence_length: int) -> float:
        """Fraction of the packed rows' tokens that are not padding, 0 to 1."""
        return self.tokens / (self.rows * sequence_length) if self.rows else 0.0


EMPTY = Split(samples=0, documents=0, tokens=0, target_tokens=0, rows=0, shards=())


@dataclass(frozen=True)
class Manifest:
    """Manifest of prepared data; `samples_read == samples_used + sum(skipped.values())`.

    `skipped` counts by the reasons of `SKIP_REASONS`. Used samples include those that were `truncated`, split into
    pieces of a row (`split_long`) or into one document per turn (`split_turns`). `stop_token_ids` end a generation.
    `largest_token_id` covers all rows, padding and stop tokens. `url`: where the shards are, if not in the folder.
    `plan_hash`: of data that was prepared in parts, the digest of their plan, or of those of its sources.
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
    url: str | None = None
    plan_hash: str | None = None
    sources: tuple[Manifest, ...] = ()
    """Of a mixture: the manifests of its sources, in order, as of this folder. Their rows follow each other."""
    version: int = VERSION
    kind: str = KIND

    @property
    def single_sources(self) -> tuple[Manifest, ...]:
        """The manifests of the single sources: `sources`, or this one."""
        return self.sources or (self,)

    @property
    def is_trained(self) -> bool:
        """Whether rows of it are trained on, rather than evaluated alone."""
        return not self.recipe.get("validation_only", False)

    @property
    def trained(self) -> tuple[Manifest, ...]:
        """The manifests of the sources that are trained on."""
        return tuple(source for source in self.single_sources if source.is_trained)

    @property
    def has_media(self) -> bool:
        """Whether some rows have images or audio."""
        return bool(self.train.media or self.validation.media)

    @property
    def content_hash(self) -> str:
        """Digest of the rows themselves.

        Two preparations of one recipe may differ: a chat template can print the date, and a new version of a tokenizer
        can split texts in other ways.
        """
        shards = (*self.train.shards, *self.validation.shards)
        # Names without folders: those of the sources of a mixture are others in an object store.
        parts = [f"{shard.file.rpartition('/')[2]} {shard.rows} {shard.sha256}" for shard in shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def identities(self) -> tuple[str, ...]:
        """Digests that a checkpoint may have of the rows that it was trained on, first the one that is stored now.

        A run that began before all rows were prepared knows the plan alone, which decides them.
        """
        complete = (self.content_hash,) if self.train.shards else ()
        return (*complete, f"plan-{self.plan_hash}") if self.plan_hash else complete

    @property
    def commits(self) -> tuple[str | None, ...]:
        """For each single source the commit of the Hub dataset that it is, if it is one and the commit is known."""
        revisions = [source.recipe["data"]["revision"] for source in self.single_sources]
        return tuple(revision if revision is not None and is_commit(revision) else None for revision in revisions)

    def write(self, folder: Path) -> None:
        """Write `manifest.json`. Whoever waits for it sees all of it or none."""
        content = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_atomic(folder / MANIFEST, content.encode(), durable=False)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest. Raises ValueError without one, for another version, or for missing or truncated shards."""
        values = values_in(folder, MANIFEST, KIND)
        if values is None:
            raise ValueError(f"{folder} has no prepared data: its {MANIFEST} is missing")
        if values["version"] != VERSION:
            raise ValueError(
                f"{folder} has prepared data of version {values['version']}, but this version of Strata reads version "
                f"{VERSION}; prepare the data again"
            )
        manifest = _manifest(values)
        for shard in (*manifest.train.shards, *manifest.validation.shards) if manifest.url is None else ():
            file = folder / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise ValueError(f"{file} is missing or truncated; delete {folder} and prepare the data again")
        return manifest


def is_prepared(folder: Path) -> bool:
    """Whether the folder has prepared data of any version, or a part of some."""
    kinds = ((MANIFEST, KIND), (PLAN, PLAN_KIND), (SOURCES, SOURCES_KIND))
    return any(values_in(folder, name, kind) is not None for name, kind in kinds)


def values_in(folder: Path, name: str, kind: str) -> dict[str, Any] | None:
    """The values in a file, or None without one of this kind: checkpoints have a `manifest.json`, too."""
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return values if isinstance(values, dict) and values.get("kind") == kind else None


def _manifest(values: dict[str, Any]) -> Manifest:
    parsed: dict[str, Any] = {name: split_of(values[name]) for name in ("train", "validation")}
    parsed |= {name: tuple(values[name]) for name in ("columns", "stop_token_ids")}
    return Manifest(**{**values, **parsed, "sources": tuple(map(_manifest, values.get("sources", ())))})


def split_of(values: dict[str, Any]) -> Split:
    """The split in the values of a file."""
    return Split(**{**values, "shards": tuple(Shard(**shard) for shard in values["shards"])})
