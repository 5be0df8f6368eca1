"""From rows to tokenized documents in a buffer. Every sample is used, or counted with the reason for skipping it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from strata_platform.spec import DataRecipe
from tasks.runtime.data.formats.columns import PROMPTS
from tasks.runtime.data.formats.documents import Document
from tasks.runtime.data.formats.known_formats import Format
from tasks.runtime.data.preparation.document_buffer import DocumentBuffer
from tasks.runtime.data.preparation.encode import Encoded, Encoder, join, split_long, truncate
from tasks.runtime.data.prepared_manifest import SKIP_REASONS
from tasks.runtime.data.reading.rows import Row, RowError, Skipped

Report = Callable[[str], None]

# Rows and characters that are tokenized together.
_BATCH = 512
_BATCH_CHARACTERS = 1 << 22
# Bytes of images or audio that count as a character.
_MEDIA_BYTES = 64
_SECONDS_BETWEEN_REPORTS = 10.0

# A sample's number, its row, and the row's documents.
_RowDocuments = tuple[int, Row, list[Document]]


def raise_unless_skipping(recipe: DataRecipe, error: RowError) -> None:
    """Raise ValueError for an invalid row, unless `data.invalid` is `skip`."""
    if recipe.data.invalid == "error":
        raise ValueError(f"{error}; correct it, or set data.invalid to 'skip'") from error


@dataclass
class Counts:
    """Counts of the samples read, used and skipped; and by reason, the first one skipped, with what is wrong."""

    read: int = 0
    used: int = 0
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    truncated: int = 0
    split_long: int = 0
    split_turns: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, example: str) -> None:
        """Count a sample as skipped."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, example)

    def first_skipped(self) -> list[str]:
        """For messages: the first sample skipped for each reason."""
        return [f"first sample skipped, {SKIP_REASONS[name]}: {example}" for name, example in self.examples.items()]

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        skipped = {reason: count + other.skipped[reason] for reason, count in self.skipped.items()}
        return Counts(
            self.read + other.read,
            self.used + other.used,
            skipped,
            self.truncated + other.truncated,
            self.split_long + other.split_long,
            self.split_turns + other.split_turns,
            {**other.examples, **self.examples},
        )

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


_Fit = Callable[[DataRecipe, list[Encoded], str, Counts], list[Encoded]]


def numbered(rows: Iterable[Row], limit: int | None) -> Iterator[tuple[int, Row]]:
    """Rows of the first `limit` samples with the sample's number; the rows of a long document share one."""
    number = -1
    for row in rows:
        number += row.begins
        if number == limit:
            return
        yield number, row


def encode_rows(
    recipe: DataRecipe,
    rows: Iterable[tuple[int, Row]],
    row_format: Format,
    encoder: Encoder,
    buffer: DocumentBuffer,
    report: Report,
    added: Callable[[], None] = lambda: None,
) -> Counts:
    """Add the documents of numbered rows to the buffer, each at most a row long.

    report: called every few seconds. added: called after each batch of rows; it may empty the buffer.

    Raises:
        ValueError: a row is invalid and `data.invalid` is `error`, or overlong and `data.overlong` is `error`.
    """
    counts = Counts()
    reported = time.monotonic()
    fit_part = _LongDocument(recipe.data.sequence_length, counts).fit
    fits: dict[bool, _Fit] = {True: _fit_pair, False: partial(_fit_sample, splits=encoder.longest is None)}
    fit = _fit_prompt if row_format.name in PROMPTS else fits[row_format.paired]
    for batch in _batches(recipe, rows, row_format, counts):
        for number, row, encoded in _encode(recipe, batch, encoder, counts):
            if row.begins and row.ends:
                pieces = fit(recipe, encoded, row.where, counts)
                counts.used += bool(pieces)
            else:
                pieces = fit_part(row, encoded[0])
            for piece in pieces:
                buffer.add(piece, number)
        added()
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            report(f"{counts.read:,} samples read, {buffer.tokens:,} tokens")
    return counts


def _batches(
    recipe: DataRecipe, rows: Iterable[tuple[int, Row]], row_format: Format, counts: Counts
) -> Iterator[list[_RowDocuments]]:
    """Rows with their documents, so many that they are tokenized at once."""
    batch: list[_RowDocuments] = []
    characters = 0
    for number, row in rows:
        counts.read += row.begins
        try:
            documents = row_format.documents(row)
        except Skipped as error:
            counts.skip(error.reason, str(error))
            continue
        except RowError as error:
            raise_unless_skipping(recipe, error)
            counts.skip("invalid", str(error))
            continue
        batch.append((number, row, documents))
        characters += sum(len(segment.text) for document in documents for segment in document.segments)
        characters += sum(_numbers(document) for document in documents)
        characters += sum(len(content) for document in documents for content in document.media) // _MEDIA_BYTES
        if len(batch) == _BATCH or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _numbers(document: Document) -> int:
    """Characters that the numbers in a document count as: a row keeps Python's, which are large."""
    tokens = 0 if document.tokens is None else document.tokens.ids.size
    return 16 * (tokens + (0 if document.top_tokens is None else document.top_tokens.token_ids.size))


def _encode(
    recipe: DataRecipe, rows: list[_RowDocuments], encoder: Encoder, counts: Counts
) -> list[tuple[int, Row, list[Encoded]]]:
    """Tokenize the documents of the rows. A row that cannot be tokenized is found by bisection."""
    try:
        encoded = iter(encoder.encode([document for _, _, documents in rows for document in documents]))
    except RowError as error:
        if len(rows) > 1:
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            return [row for half in halves for row in _encode(recipe, half, encoder, counts)]
        row = rows[0][1]
        if not (row.begins and row.ends):
            raise ValueError(f"{row.where}: {error}") from error
        problem = RowError(f"{row.where}: {error}")
        raise_unless_skipping(recipe, problem)
        counts.skip("invalid", str(problem))
        return []
    return [(number, row, [next(encoded) for _ in documents]) for number, row, documents in rows]


class _LongDocument:
    """Splits a document that comes in several rows as if it came in one."""

    def __init__(self, length: int, counts: Counts) -> None:
        self._length = length
        self._counts = counts
        self._rest: Encoded | None = None
        self._pieces = 0

    def fit(self, row: Row, part: Encoded) -> list[Encoded]:
        """Pieces of at most a row; the last one waits for what follows, unless the document ends."""
        whole = part if self._rest is None else join(self._rest, part)
        pieces = split_long(whole, self._length)
        self._rest = None if row.ends else pieces.pop()
        self._pieces += len(pieces)
        if row.ends:
            self._counts.used += 1
            self._counts.split_long += self._pieces > 1
            self._pieces = 0
        return pieces


def _fit_sample(
    recipe: DataRecipe, documents: list[Encoded], where: str, counts: Counts, *, splits: bool
) -> list[Encoded]:
    """The documents of one sample, each at most a row long; empty when the sample is skipped, which is counted.

    splits: whether documents longer than a row are split; otherwise `data.overlong` decides.
    """
    length = recipe.data.sequence_length
    # What was not tokenized may carry loss.
    learned = [document for document in documents if document.targets.any() or not document.complete]
    split_turns = len(documents) > 1
    if too_long := [document for document in learned if len(document) > length]:
        if splits:
            learned = [piece for document in learned for piece in split_long(document, length)]
            counts.split_long += 1
        elif recipe.data.overlong != "truncate" or any(not _can_truncate(one, length) for one in too_long):
            _skip_overlong(recipe, where, max(too_long, key=len), counts)
            return []
        else:
            learned = [document for document in (truncate(one, length) for one in learned) if document.targets.any()]
            counts.truncated += bool(learned)
    if not learned:
        counts.skip("no_target", where)
    counts.split_turns += split_turns and bool(learned)
    return learned


def _fit_pair(recipe: DataRecipe, documents: list[Encoded], where: str, counts: Counts) -> list[Encoded]:
    """Both documents of a preference pair, which share a row; empty when skipped. The longer one is truncated first."""
    length = recipe.data.sequence_length
    longest = sum(map(len, documents))
    if longest > length:
        if recipe.data.overlong != "truncate":
            _skip_overlong(recipe, where, join(*documents), counts)
            return []
        limit = max(length // 2, length - min(map(len, documents)))
        if any(len(document) > limit and not _can_truncate(document, limit) for document in documents):
            _skip_overlong(recipe, where, join(*documents), counts)
            return []
        documents = [truncate(document, limit) for document in documents]
    # Different answers may have the same tokens, at least up to the truncation. Such a pair has no gradient.
    equal = len({document.ids.tobytes() for document in documents}) < len(documents)
    if not documents or equal or not all(document.targets.any() for document in documents):
        counts.skip("no_target", where)
        return []
    counts.truncated += longest > length
    return documents


def _fit_prompt(recipe: DataRecipe, documents: list[Encoded], where: str, counts: Counts) -> list[Encoded]:
    """The prompt of one sample; empty when it is skipped. Its last token is marked: an answer follows it."""
    for document in documents:
        if len(document) > recipe.data.sequence_length:
            _skip_overlong(recipe, where, document, counts)
            return []
        document.targets[-1:] = True
    if not documents:
        counts.skip("no_target", where)
    return documents


def _can_truncate(document: Encoded, length: int) -> bool:
    """Whether the first `length` tokens of a document have those of all its images and audio."""
    return not document.media or (document.complete and document.media_end <= length)


def _skip_overlong(recipe: DataRecipe, where: str, longest: Encoded, counts: Counts) -> None:
    """Count a sample that is longer than a row as skipped. Raises ValueError when `data.overlong` is `error`."""
    tokens = f"{'' if longest.complete else 'more than '}{len(longest)} tokens"
    if recipe.data.overlong == "error":
        raise ValueError(
            f"{where}: {tokens}, but data.sequence_length is {recipe.data.sequence_length}; raise it, or set "
            "data.overlong to 'skip' or 'truncate'"
        )
    counts.skip("overlong", f"{where}: {tokens}")
