"""The folder of a mixture: where its sources are prepared, and then all of them together.

Each source is prepared by its own recipe, in its own folder, which other runs share. When all are, the folder of the
mixture has hard links to their shards, so that it is complete by itself and takes no space. Shards in an object store
stay where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from strata_platform.file_io import write_atomic
from strata_platform.spec import DataRecipe
from tasks.runtime.data.dataset import SAMPLES, TOKENIZER, PreparedData
from tasks.runtime.data.formats.columns import CHATS, PREFERENCES, PROMPTS
from tasks.runtime.data.formats.own_format import is_own_chat
from tasks.runtime.data.media.media_processor import copy_processor
from tasks.runtime.data.preparation.atomic_folder import require_replaceable
from tasks.runtime.data.preparation.preparation_plan import Plan
from tasks.runtime.data.prepared_manifest import EMPTY, SOURCES, SOURCES_KIND, Manifest, Split, values_in
from tasks.runtime.run_folder import format_versions

# The format of a mixture of several.
_MIXED = "mixed"


def claim_folder(recipe: DataRecipe, out: Path, url: str | None) -> list[Path]:
    """Make the folder of a mixture, if it is not there, and return the folders of its sources.

    With an object store they are within it, and so small that they travel between pods with it.

    Raises:
        ValueError: `out` has files that are no prepared data.
    """
    require_replaceable(out)
    within = "sources" if url is not None else ".."
    folders = [f"{within}/{single.hash()}" for single in recipe.single_sources()]
    values = {"kind": SOURCES_KIND, "version": format_versions.DATA, "url": url, "folders": folders}
    values["recipe"] = recipe.model_dump(mode="json")
    if values_in(out, SOURCES, SOURCES_KIND) != values:
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        content = json.dumps(values, ensure_ascii=False, indent=1) + "\n"
        write_atomic(out / SOURCES, content.encode(), durable=False)
    return source_folders(out)


def source_folders(out: Path) -> list[Path]:
    """The folders of the sources of a mixture, in order; empty if `out` is not the folder of one."""
    values = values_in(out, SOURCES, SOURCES_KIND)
    return [] if values is None else [Path(os.path.normpath(out / folder)) for folder in values["folders"]]


def mixture_of(out: Path) -> tuple[DataRecipe, str | None]:
    """The recipe of the mixture in a folder, and the object store of its shards, if they are in one."""
    values = values_in(out, SOURCES, SOURCES_KIND)
    assert values is not None
    return DataRecipe.model_validate(values["recipe"]), values["url"]


def copy_tokenizer(sources: Sequence[tuple[Path, Manifest | Plan]], out: Path) -> None:
    """Give a mixture the tokenizer of its sources: all have the same tokens, those of chats also the chat template."""
    chats = [folder for folder, source in sources if _has_chats(source)]
    shutil.copytree((chats or [folder for folder, _ in sources])[0] / TOKENIZER, out / TOKENIZER, dirs_exist_ok=True)


def _has_chats(source: Manifest | Plan) -> bool:
    return source.format in CHATS or is_own_chat(DataRecipe.model_validate(source.recipe).data)


def compose(out: Path, sources: Sequence[PreparedData]) -> None:
    """Make the folder of a mixture complete from its prepared sources; its tokenizer is there."""
    recipe, url = mixture_of(out)
    moved = [_moved(source, out, str(number), url) for number, source in enumerate(sources)]
    for source in sources:
        copy_processor(source.folder / TOKENIZER, out / TOKENIZER)
    rounds = zip_longest(*(source.samples() for source in sources))
    samples = [sample._asdict() for sample in chain.from_iterable(rounds) if sample is not None]
    write_atomic(out / SAMPLES, f"{json.dumps(samples, ensure_ascii=False, indent=1)}\n".encode(), durable=False)
    # Last: who waits for it reads the others next.
    merged(recipe, [source.manifest for source in sources], moved).write(out)


def _moved(source: PreparedData, out: Path, name: str, url: str | None) -> Manifest:
    """The manifest of a source, whose shards are found from `out`, or from the URL of an object store."""
    manifest = source.manifest
    folder = name if url is None else manifest.recipe_hash
    if url is None:
        # What a killed process left.
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir()
        for shard in (*manifest.train.shards, *manifest.validation.shards):
            _link_or_copy(source.folder / shard.file, out / folder / shard.file)

    def moved(split: Split) -> Split:
        return replace(split, shards=tuple(replace(shard, file=f"{folder}/{shard.file}") for shard in split.shards))

    return replace(manifest, url=url, train=moved(manifest.train), validation=moved(manifest.validation))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Some file systems have no links.
        shutil.copyfile(source, target)


def merged(recipe: DataRecipe, sources: Sequence[Manifest], moved: Sequence[Manifest]) -> Manifest:
    """The manifest of a mixture. sources: those of its sources; moved: the same, as of its folder."""
    formats = {source.format for source in sources}
    for alike in (PREFERENCES, PROMPTS):
        if formats <= {*alike}:
            formats = {alike[0]}
    return replace(
        moved[0],
        recipe=recipe.model_dump(mode="json"),
        recipe_hash=recipe.hash(),
        source=", ".join(source.source for source in sources),
        format=formats.pop() if len(formats) == 1 else _MIXED,
        columns=(),
        samples_read=sum(source.samples_read for source in sources),
        samples_used=sum(source.samples_used for source in sources),
        skipped={reason: sum(source.skipped[reason] for source in sources) for reason in sources[0].skipped},
        truncated=sum(source.truncated for source in sources),
        split_long=sum(source.split_long for source in sources),
        split_turns=sum(source.split_turns for source in sources),
        train=sum((source.train for source in moved), EMPTY),
        validation=sum((source.validation for source in moved), EMPTY),
        largest_token_id=max(source.largest_token_id for source in sources),
        stop_token_ids=tuple(sorted({token for source in sources for token in source.stop_token_ids})),
        plan_hash=_plan_hash(sources),
        sources=tuple(moved),
    )


def _plan_hash(sources: Sequence[Manifest]) -> str | None:
    """Digest of all that decides the rows, if some were prepared in parts: known before all are."""
    if not any(source.plan_hash for source in sources):
        return None
    digests = [source.plan_hash or source.content_hash for source in sources]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
