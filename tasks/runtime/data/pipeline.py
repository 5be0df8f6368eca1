"""The preparation pipeline: from a recipe to a folder with shards of rows, tokenizer, samples and manifest."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.atomic_folder import atomic_folder, folder_lock
from tasks.runtime.data.columns import Unread, columns_of, keys_in
from tasks.runtime.data.dataset import SAMPLES, TOKENIZER, PreparedData, Sample
from tasks.runtime.data.document_buffer import DocumentBuffer
from tasks.runtime.data.encode import Encoded, Encoder
from tasks.runtime.data.encode_rows import Report, encode_rows, numbered, raise_unless_skipping
from tasks.runtime.data.fingerprint import recipe_digest
from tasks.runtime.data.formats import Format, choose_format, make_format, raw_text
from tasks.runtime.data.prepared_manifest import Manifest, Split
from tasks.runtime.data.rows import Row, RowError
from tasks.runtime.data.sources import open_source
from tasks.runtime.data.special_tokens import texts_in
from tasks.runtime.data.template_renderer import stop_rendering
from tasks.runtime.data.text_files import pieces
from tasks.runtime.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer, trains_tokenizer
from tasks.runtime.data.validation import hold_out, uniform

Rows = Callable[[], Iterator[tuple[int, Row]]]

# Rows that are read to choose the format.
_FORMAT_ROWS = 100
_FORMAT_CHARACTERS = 1 << 26
_MAX_GENERATION_SAMPLES = 64
# Texts are short if a row has more than this many times the median's tokens.
_SHORT = 16


def prepare(recipe: DataRecipe, out: Path, *, report: Report) -> PreparedData:
    """Prepare the recipe's data in the folder `out`, or reuse the data if `out` has the same recipe's already.

    The folder is written atomically. Concurrent preparations of the same folder wait for each other. A recipe without a
    fingerprint gets one here, so that changed files are noticed.

    report: called with lines for the log: the format, progress every few seconds, the final counts.

    Raises:
        ValueError: the source is not found, unreadable or empty; a column is missing; a row is invalid and
            `data.invalid` is `error`; no sample is usable; or `out` has other files.
    """
    if not recipe.fingerprint:
        recipe = recipe.model_copy(update={"fingerprint": recipe_digest(recipe)})
    out = Path(out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(out):
        if found := _reusable(out, recipe):
            report(f"the data of recipe {recipe.hash()} is already prepared in {out}")
            return found
        with atomic_folder(out, is_usable=lambda: _reusable(out, recipe) is not None) as folder:
            try:
                _build(recipe, folder, report)
            finally:
                stop_rendering()
    return PreparedData.load(out)


def _reusable(out: Path, recipe: DataRecipe) -> PreparedData | None:
    try:
        found = PreparedData.load(out)
    except ValueError:
        return None
    return found if found.manifest.recipe_hash == recipe.hash() else None


def _build(recipe: DataRecipe, folder: Path, report: Report) -> None:
    started = time.monotonic()
    source = open_source(recipe)
    for note in source.notes:
        report(f"{source.name}: {note}")

    def rows() -> Iterator[tuple[int, Row]]:
        return numbered(source.rows(), recipe.data.max_samples)

    first = _first(row for _, row in rows())
    if not first:
        raise ValueError(f"data.source {source.name!r} has no rows")
    name, columns = choose_format(recipe, first)
    report(f"{source.name}: format {name}, from {', '.join(columns)}")
    _report_unread(recipe, name, columns, first, report)
    tokenizer = _tokenizer(recipe, rows, name, columns, report)
    row_format = make_format(name, columns, tokenizer, recipe.data, first)
    if recipe.data.chat_template and row_format.templates is None:
        warnings.warn(f"data.chat_template has no effect: the data's format is {name}", stacklevel=3)
    if row_format.templates is not None:
        tokenizer.chat_template = row_format.templates
    save_tokenizer(tokenizer, folder / TOKENIZER)
    splits = recipe.objective == "pretrain" or name == "text"
    encoder = Encoder(
        tokenizer, learn_all=recipe.objective == "pretrain", longest=None if splits else recipe.data.sequence_length
    )
    with DocumentBuffer(folder) as buffer:
        counts = encode_rows(recipe, rows(), row_format, encoder, buffer, report)
        if not counts.used:
            raise ValueError(f"data.source {source.name!r}: nothing is left to train on; {counts}")
        _report_special_tokens(row_format, report)
        if name == "text":
            _report_lengths(recipe, buffer, report)
        train, validation = _write_splits(recipe, folder, buffer, tokenizer, encoder, row_format, report)
    stop_tokens = _stop_tokens(tokenizer, encoder)
    manifest = Manifest(
        recipe=recipe.model_dump(mode="json"),
        recipe_hash=recipe.hash(),
        source=source.name,
        format=name,
        columns=columns,
        sequence_length=recipe.data.sequence_length,
        packing=recipe.data.packing,
        samples_read=counts.read,
        samples_used=counts.used,
        skipped=counts.skipped,
        truncated=counts.truncated,
        split_long=counts.split_long,
        split_turns=counts.split_turns,
        train=train,
        validation=validation,
        vocabulary_size=len(tokenizer),
        largest_token_id=max(buffer.largest_token_id, tokenizer.pad_token_id, *stop_tokens),
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=stop_tokens,
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in ("tokenizers", "transformers", "numpy")},
        },
    )
    assert manifest.samples_read == manifest.samples_used + sum(manifest.skipped.values())
    manifest.write(folder)
    report(f"{source.name}: {counts}")
    for split_name, split in (("train", train), ("validation", validation)):
        report(_describe(split_name, split, manifest))
    report(f"prepared in {time.monotonic() - started:.1f} s")


def _first(rows: Iterator[Row]) -> list[Row]:
    """The rows that choose the format: fewer if they are long."""
    first: list[Row] = []
    characters = 0
    for row in islice(rows, _FORMAT_ROWS):
        first.append(row)
        characters += sum(map(len, texts_in(row.values)))
        if characters > _FORMAT_CHARACTERS:
            break
    return first


def _report_unread(recipe: DataRecipe, name: str, columns: tuple[str, ...], first: list[Row], report: Report) -> None:
    """Report the columns of the first rows that are not read. Raises ValueError if one changes what a row means.

    Warns of fields of `data` that name a column in vain.
    """
    unread = Unread(name, columns, recipe.data)
    for field in unread.without_effect():
        warnings.warn(f"data.{field} has no effect: the data's format is {name}", stacklevel=4)
    for row in first:
        unread.require_harmless(row)
    if left := [column for column in columns_of(first) if column not in unread.read]:
        report(f"columns not used: {', '.join(map(repr, left))}")
    # It names keys of messages, too.
    known = keys_in([row.values for row in first])
    if missing := [column for column in recipe.data.ignore_columns if column not in known]:
        found = f"none of the first {len(first)} rows has {', '.join(map(repr, missing))}"
        warnings.warn(f"data.ignore_columns: {found}", stacklevel=4)


def _tokenizer(
    recipe: DataRecipe, rows: Rows, name: str, columns: tuple[str, ...], report: Report
) -> PreTrainedTokenizerBase:
    if not trains_tokenizer(recipe):
        return load_tokenizer(recipe)
    report("training a tokenizer on the data")
    return train_tokenizer(_training_texts(recipe, rows(), name, columns))


def _training_texts(
    recipe: DataRecipe, rows: Iterator[tuple[int, Row]], name: str, columns: tuple[str, ...]
) -> Iterator[str]:
    """Texts of the training split. Skips invalid rows without counting them, which happens later.

    Plain texts are all taken: what is held out of them is known only when they are tokenized.
    """
    for number, row in rows:
        if name != "text" and uniform(recipe.seed, number) < recipe.data.validation_fraction:
            continue
        try:
            yield from pieces(raw_text(name, columns, row, recipe.data))
        except RowError as error:
            raise_unless_skipping(recipe, error)


def _report_special_tokens(row_format: Format, report: Report) -> None:
    special = row_format.special_tokens
    if special.example:
        token, where = special.example
        taken, other = ("control tokens", "text") if special.control else ("text", "control")
        report(
            f"{special.found:,} samples contain special tokens, such as {token!r} in {where}, which are taken as "
            f"{taken}; to change that, set data.special_tokens to {other!r}"
        )


def _report_lengths(recipe: DataRecipe, buffer: DocumentBuffer, report: Report) -> None:
    """Report the texts' lengths. Warns when most are so short that rows hold hardly any context."""
    samples, pieces_of = np.unique(buffer.samples, return_inverse=True)
    # Each piece of a text repeats the last token of the one before.
    lengths = np.bincount(pieces_of, weights=buffer.lengths - 1) + 1
    median, length = int(np.median(lengths)), recipe.data.sequence_length
    report(f"{samples.size:,} documents, median {median:,} tokens")
    if recipe.objective == "pretrain" and median * _SHORT < length:
        way_out = "join texts that belong together"
        if recipe.data.documents != "file":
            way_out = "set data.documents to 'file'"
        elif recipe.data.document_separator is not None:
            way_out = "leave out data.document_separator"
        warnings.warn(
            f"half of the documents have at most {median:,} tokens, far fewer than data.sequence_length {length:,}, "
            f"and none attends to another: the model sees little context. To train on longer ones, {way_out}.",
            stacklevel=4,
        )


def _write_splits(
    recipe: DataRecipe,
    folder: Path,
    buffer: DocumentBuffer,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    row_format: Format,
    report: Report,
) -> tuple[Split, Split]:
    samples, fraction = buffer.samples, recipe.data.validation_fraction
    in_validation, ends = hold_out(
        samples, buffer.lengths, fraction=fraction, seed=recipe.seed, divisible=row_format.name == "text"
    )
    if ends:
        share = f"the last {100 * fraction:g} % of each long text"
        report(f"validation: {share}, because whole texts would be too much or none")
    length = recipe.data.sequence_length if recipe.data.packing else None
    group_size = 2 if row_format.paired else 1
    splits = [
        buffer.write_shards(
            folder, name, np.flatnonzero(chosen), length=length, seed=recipe.seed, group_size=group_size
        )
        for name, chosen in (("train", ~in_validation), ("validation", in_validation))
    ]
    # The first document of each validation sample, or any end of a text.
    shown = np.flatnonzero(in_validation & (ends | (np.diff(samples, prepend=-1) != 0)))[:_MAX_GENERATION_SAMPLES]
    found = [_generation_sample(buffer.document(int(document)), tokenizer, encoder.prefix_ids) for document in shown]
    stored = json.dumps([sample._asdict() for sample in found if sample], ensure_ascii=False, indent=1)
    (folder / SAMPLES).write_text(stored + "\n", encoding="utf-8")
    return splits[0], splits[1]


def _generation_sample(document: Encoded, tokenizer: PreTrainedTokenizerBase, prefix_ids: list[int]) -> Sample | None:
    """A document as prompt and completion; a document without a prompt is split in the middle."""
    begin, end = document.completion_span
    ids = document.ids.tolist()
    skipped = len(prefix_ids) if ids[: len(prefix_ids)] == prefix_ids else 0
    if begin <= skipped:
        begin = (begin + end + 1) // 2
    if not skipped < begin < end:
        return None
    return Sample(
        prompt=tokenizer.decode(ids[skipped:begin], clean_up_tokenization_spaces=False),
        completion=tokenizer.decode(ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False),
        prompt_ids=ids[:begin],
    )


def _stop_tokens(tokenizer: PreTrainedTokenizerBase, encoder: Encoder) -> tuple[int, ...]:
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    end_ids = encoder.turn_end_ids & special
    if encoder.turn_end_ids and not end_ids:
        warnings.warn(
            "data.chat_template: no special token ends the assistant's turns, so the model will not learn to stop",
            stacklevel=2,
        )
    return tuple(sorted({tokenizer.eos_token_id, *end_ids}))


def _describe(name: str, split: Split, manifest: Manifest) -> str:
    rows = f"{split.rows:,} rows"
    if manifest.packing:
        rows += f" of {manifest.sequence_length} tokens, {100 * split.fill(manifest.sequence_length):.1f} % full"
    return f"{name}: {split.samples:,} samples, {split.tokens:,} tokens, {split.target_tokens:,} with loss, in {rows}"
