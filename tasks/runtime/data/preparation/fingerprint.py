"""Fingerprint of the contents that a recipe reads: with the recipe's fields, the cache key of prepared data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from strata_platform.file_io import require_regular_files
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.data import Data, is_template_file
from tasks.runtime.data.chat.prompt_template import template_file
from tasks.runtime.data.chat.template_source import readable_template
from tasks.runtime.data.formats.own_format import is_own, own_digest
from tasks.runtime.data.preparation.tokenizer_files import PROCESSOR_FILES, TOKENIZER_FILES
from tasks.runtime.data.prepared_manifest import VERSION
from tasks.runtime.data.reading.readers import naming_file
from tasks.runtime.data.reading.sources import Files, HubDataset, Source, open_source


def fingerprint(spec: RunSpec) -> str:
    """Digest of the contents that preparing `spec`'s data reads, for `DataRecipe.from_spec(spec, fingerprint)`.

    It covers the contents of local files (data, tokenizer, processor, templates) and the code of a format of your own;
    size, ETag and time of remote files; the commit of a Hub dataset; Python's version and library source for the
    built-in data. A tokenizer on the Hub counts by name and revision.

    Raises:
        ValueError: the source is not found or cannot be read.
    """
    return recipe_digest(DataRecipe.from_spec(spec))


def recipe_of(spec: RunSpec, commits: Sequence[str | None] = ()) -> DataRecipe:
    """The recipe of `spec`'s data, with its fingerprint, and pinned to the commits of the Hub datasets that it reads.

    commits: of the sources that the run has read so far, None for one that is not on the Hub; by default those that
        their `revision` resolves to now.

    Raises:
        ValueError: as `fingerprint`.
    """
    recipe = DataRecipe.from_spec(spec)
    sources = [open_source(single) for single in recipe.single_sources()]
    pinned: list[str | None] = []
    for number, commit in enumerate(commits or [None] * len(sources)):
        source, revision = sources[number], None
        if isinstance(source, HubDataset) and (revision := commit or source.commit()):
            sources[number] = replace(source, revision=revision)
        pinned.append(revision)
    recipe = recipe.model_copy(update={"data": recipe.data.with_revisions(pinned)})
    return recipe.model_copy(update={"fingerprint": _joined_digests(recipe, sources)})


def recipe_digest(recipe: DataRecipe) -> str:
    """See `fingerprint`."""
    return _joined_digests(recipe, [open_source(single) for single in recipe.single_sources()])


def _joined_digests(recipe: DataRecipe, sources: Sequence[Source]) -> str:
    """The digests of single sources. Raises ValueError when two are the same, whatever their paths."""
    singles = recipe.single_sources()
    digests = [_digest(single, source) for single, source in zip(singles, sources, strict=True)]
    trained: dict[str, tuple[str, Data]] = {}
    for single, source, digest in zip(singles, sources, digests, strict=True):
        if isinstance(source, Files) and not single.validation_only:
            read = single.data.model_copy(update={"source": None})
            other, read_before = trained.setdefault(digest, (source.name, read))
            if other != source.name and read_before == read:
                raise ValueError(
                    f"data.sources: {source.name!r} has the rows of {other!r}; leave one out, and raise the weight of "
                    "the other to draw more of it"
                )
    for single, source, digest in zip(singles, sources, digests, strict=True):
        if single.validation_only and digest in trained:
            raise ValueError(
                f"data.validation_source {source.name!r} has the rows of {trained[digest][0]!r}, which are trained on; "
                "name others, or leave it out and set data.validation_fraction"
            )
    return ",".join(digests)


def _digest(recipe: DataRecipe, source: Source) -> str:
    parts = [f"version {VERSION}", source.digest()]
    if recipe.trains_tokenizer:
        parts.append(f"tokenizers {version('tokenizers')}")
    folder = Path(recipe.tokenizer or recipe.model)
    if folder.is_dir():
        with naming_file(str(folder), field="model.tokenizer" if recipe.tokenizer else "model.name"):
            require_regular_files(folder)
        parts += [_file_digest(path) for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern))]
    # The processor of images or audio is the model's, also with a tokenizer from elsewhere.
    parts += [_file_digest(path) for file in PROCESSOR_FILES if (path := Path(recipe.model) / file).is_file()]
    if recipe.data.image_max_pixels is not None:
        # Images that it made smaller were stored clipped by earlier versions.
        parts.append("gray of 16 bits is scaled, 32 bits are refused")
    if is_own(recipe.data.format):
        parts.append(f"format {own_digest(recipe.data)}")
    template = recipe.data.chat_template or ""
    if template.endswith(".jinja"):
        parts.append(_file_digest(readable_template(template)))
    if recipe.data.template is not None and is_template_file(recipe.data.template):
        parts.append(f"template {_file_digest(template_file(recipe.data.template))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
