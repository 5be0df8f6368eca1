"""The preparation pipeline: from a recipe to a folder with shards of rows, tokenizer, samples and manifest."""

from __future__ import annotations

import hashlib
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from tasks.runtime.data.atomic_folder import atomic_folder, folder_lock
from tasks.runtime.data.dataset import SAMPLES, TOKENIZER, PreparedData, Sample
from tasks.runtime.data.document_buffer import DocumentBuffer
from tasks.runtime.data.encode import Encoded, Encoder, split_long, truncate
from tasks.runtime.data.fingerprint import recipe_digest
from tasks.runtime.data.formats import Document, Format, choose_format, make_format, raw_text
from tasks.runtime.data.prepared_manifest import SKIP_REASONS, Manifest, Split
from tasks.runtime.data.rows import Row, RowError
from tasks.runtime.data.sources import open_source
from tasks.runtime.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer, trains_tokenizer

Report = Callable[[str], None]
Rows = Callable[[], Iterator[Row]]
# A row's number and name, and its documents.
_RowDocuments = tuple[int, str, list[Document]]

_BATCH = 512
# Rows that are read to choose the format.
_FORMAT_ROWS = 100
_MAX_GENERATION_SAMPLES = 64
_SECONDS_BETWEEN_REPORTS = 10.0


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
            _build(recipe, folder, report)
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

    def rows() -> Iterator[Row]:
        return islice(source.rows(), recipe.data.max_samples)

    first = list(islice(rows(), _FORMAT_ROWS))
    if not first:
        raise ValueError(f"data.source {source.name!r} has no rows")
    name, columns = choose_format(recipe, first)
    report(f"{source.name}: format {name}, from {', '.join(columns)}")
    tokenizer = _tokenizer(recipe, rows, name, columns, report)
    row_format = make_format(name, columns, tokenizer, recipe.data.chat_template)
    if recipe.data.chat_template and row_format.templates is None:
        warnings.warn(f"data.chat_template has no effect: the data's format is {name}", stacklevel=3)
    if row_format.templates is not None:
        tokenizer.chat_template = row_format.templates
    save_tokenizer(tokenizer, folder / TOKENIZER)
    encoder = Encoder(tokenizer, learn_all=recipe.objective == "pretrain")
    with DocumentBuffer(folder) as buffer:
        counts = _encode_all(recipe, rows(), row_format, encoder, buffer, report)
        if not counts.used:
            raise ValueError(f"data.source {source.name!r}: nothing is left to train on; {counts}")
        train, validation = _write_splits(
            recipe, folder, buffer, tokenizer, encoder, group_size=2 if row_format.paired else 1
        )
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


def _tokenizer(
    recipe: DataRecipe, rows: Rows, name: str, columns: tuple[str, ...], report: Report
) -> PreTrainedTokenizerBase:
    if not trains_tokenizer(recipe):
        return load_tokenizer(recipe)
    report("training a tokenizer on the data")
    return train_tokenizer(_training_texts(recipe, rows(), name, columns))


def _training_texts(recipe: DataRecipe, rows: Iterator[Row], name: str, columns: tuple[str, ...]) -> Iterator[str]:
    """Texts of the training split. Skips invalid rows without counting them, which happens later."""
    for number, row in enumerate(rows):
        if _uniform(recipe.seed, number) < recipe.data.validation_fraction:
            continue
        try:
            yield raw_text(name, columns, row)
        except RowError as error:
            _raise_unless_skipping(recipe, error)


def _raise_unless_skipping(recipe: DataRecipe, error: RowError) -> None:
    """Raise ValueError for an invalid row, unless `data.invalid` is `skip`."""
    if recipe.data.invalid == "error":
        raise ValueError(f"{error}; correct it, or set data.invalid to 'skip'") from error


@dataclass
class _Counts:
    """Counts of the samples read, used and skipped."""

    read: int = 0
    used: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    truncated: int = 0
    split_long: int = 0
    split_turns: int = 0

    def __str__(self) -> str:
        parts = [f"{self.read:,} samples read = {self.used:,} used"]
        parts += [f"{count:,} skipped ({SKIP_REASONS[reason]})" for reason, count in self.skipped.items() if count]
        notes = {
            "truncated to a row": self.truncated,
            "longer than a row, split": self.split_long,
            "split by turns, because the chat template rewrites earlier ones": self.split_turns,
        }
        shown = "; ".join(f"{count:,} {words}" for words, count in notes.items() if count)
        return " + ".join(parts) + (f"; of those used, {shown}" if shown else "")


def _encode_all(
    recipe: DataRecipe,
    rows: Iterator[Row],
    row_format: Format,
    encoder: Encoder,
    buffer: DocumentBuffer,
    report: Report,
) -> _Counts:
    counts = _Counts()
    reported = time.monotonic()
    for batch in _batches(enumerate(rows)):
        pending: list[_RowDocuments] = []
        for number, row in batch:
            counts.read += 1
            try:
                pending.append((number, row.where, row_format.documents(row)))
            except RowError as error:
                _raise_unless_skipping(recipe, error)
                counts.skipped["invalid"] += 1
        fit = (
            _fit_pair
            if row_format.paired
            else partial(_fit_sample, splits=recipe.objective == "pretrain" or row_format.name == "text")
        )
        for number, where, encoded in _encode(recipe, pending, encoder, counts):
            pieces = fit(recipe, encoded, where, counts)
            for piece in pieces:
                buffer.add(piece, number)
            counts.used += bool(pieces)
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            report(f"{counts.read:,} samples read, {buffer.tokens:,} tokens")
    return counts


def _encode(
    recipe: DataRecipe, rows: list[_RowDocuments], encoder: Encoder, counts: _Counts
) -> list[tuple[int, str, list[Encoded]]]:
    """Tokenize the documents of the rows. A row that cannot be tokenized is found by bisection."""
    try:
        encoded = iter(encoder.encode([document for _, _, documents in rows for document in documents]))
    except RowError as error:
        if len(rows) > 1:
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            return [row for half in halves for row in _encode(recipe, half, encoder, counts)]
        _raise_unless_skipping(recipe, RowError(f"{rows[0][1]}: {error}"))
        counts.skipped["invalid"] += 1
        return []
    return [(number, where, [next(encoded) for _ in documents]) for number, where, documents in rows]


def _fit_sample(
    recipe: DataRecipe, documents: list[Encoded], where: str, counts: _Counts, *, splits: bool
) -> list[Encoded]:
    """The documents of one sample, each at most a row long; empty when the sample is skipped, which is counted.

    splits: whether documents longer than a row are split; otherwise `data.overlong` decides.
    """
    length = recipe.data.sequence_length
    learned = [document for document in documents if document.targets.any()]
    split_turns = len(documents) > 1
    if longest := max((len(document) for document in learned if len(document) > length), default=0):
        if splits:
            learned = [piece for document in learned for piece in split_long(document, length)]
            counts.split_long += 1
        elif recipe.data.overlong != "truncate":
            _skip_overlong(recipe, where, longest, counts)
            return []
        else:
            learned = [document for document in (truncate(one, length) for one in learned) if document.targets.any()]
            counts.truncated += bool(learned)
    if not learned:
        counts.skipped["no_target"] += 1
    counts.split_turns += split_turns and bool(learned)
    return learned


def _fit_pair(recipe: DataRecipe, documents: list[Encoded], where: str, counts: _Counts) -> list[Encoded]:
    """Both documents of a preference pair, which share a row; empty when skipped. The longer one is truncated first."""
    length = recipe.data.sequence_length
    longest = sum(map(len, documents))
    if longest > length:
        if recipe.data.overlong != "truncate":
            _skip_overlong(recipe, where, longest, counts)
            return []
        limit = max(length // 2, length - min(map(len, documents)))
        documents = [truncate(document, limit) for document in documents]
    # Different answers may have the same tokens, at least up to the truncation. Such a pair has no gradient.
    equal = len({document.ids.tobytes() for document in documents}) < len(documents)
    if not documents or equal or not all(document.targets.any() for document in documents):
        counts.skipped["no_target"] += 1
        return []
    counts.truncated += longest > length
    return documents


def _skip_overlong(recipe: DataRecipe, where: str, tokens: int, counts: _Counts) -> None:
    """Count a sample that is longer than a row as skipped. Raises ValueError when `data.overlong` is `error`."""
    if recipe.data.overlong == "error":
        raise ValueError(
            f"{where}: {tokens} tokens, but data.sequence_length is {recipe.data.sequence_length}; raise it, or set "
            "data.overlong to 'skip' or 'truncate'"
        )
    counts.skipped["overlong"] += 1


def _write_splits(
    recipe: DataRecipe,
    folder: Path,
    buffer: DocumentBuffer,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    *,
    group_size: int,
) -> tuple[Split, Split]:
    samples = buffer.samples
    used, sample_of = np.unique(samples, return_inverse=True)
    in_validation = _validation_mask(recipe, used)[sample_of]
    length = recipe.data.sequence_length if recipe.data.packing else None
    splits = [
        buffer.write_shards(
            folder, name, np.flatnonzero(chosen), length=length, seed=recipe.seed, group_size=group_size
        )
        for name, chosen in (("train", ~in_validation), ("validation", in_validation))
    ]
    # The first document of each validation sample.
    shown = np.flatnonzero(in_validation & (np.diff(samples, prepend=-1) != 0))[:_MAX_GENERATION_SAMPLES]
    found = [_generation_sample(buffer.document(int(document)), tokenizer, encoder.prefix_ids) for document in shown]
    stored = json.dumps([sample._asdict() for sample in found if sample], ensure_ascii=False, indent=1)
    (folder / SAMPLES).write_text(stored + "\n", encoding="utf-8")
    return splits[0], splits[1]


def _validation_mask(recipe: DataRecipe, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mask of the validation samples: those whose random number is below the fraction; at least one, never all.

    The number depends only on the seed and the sample's index, so rows that are appended to a source move no other
    sample between the splits.
    """
    fraction = recipe.data.validation_fraction
    draws = np.array([_uniform(recipe.seed, int(sample)) for sample in samples])
    in_validation = draws < fraction
    if fraction > 0 and draws.size >= 2:
        in_validation[np.argmin(draws)] = True
        in_validation[np.argmax(draws)] = False
    return in_validation if draws.size >= 2 else np.zeros(draws.size, dtype=np.bool_)


def _uniform(seed: int, number: int) -> float:
    """A uniform random number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=7).digest()) / 2**56


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


def _batches(items: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
