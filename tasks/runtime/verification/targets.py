"""Checks the targets: the texts that the model has to write according to the source, and the end token of each turn.

The check compares the decoded text of prepared rows with the text of the source. It uses neither the chat template nor
the tokenizer's offsets again, because an error in these would affect targets and expectation alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import Data
from tasks.runtime.data import PreparedData
from tasks.runtime.data.chat.messages import learned_messages
from tasks.runtime.data.chat.row_chats import chats_of
from tasks.runtime.data.dataset import IGNORE_INDEX, Row
from tasks.runtime.data.reading.rows import Row as SourceRow
from tasks.runtime.data.reading.rows import RowError
from tasks.runtime.data.reading.sources import open_source
from tasks.runtime.verification.finding import Measured, Piece
from tasks.runtime.verification.subject import Subject

# Characters of the document that the report shows.
_SHOWN = 1200
_FORMATS = ("chat", "alpaca", "prompt_completion")


class Document(NamedTuple):
    """A document of a prepared row."""

    ids: list[int]
    learned: list[bool]

    def runs(self) -> list[tuple[bool, list[int]]]:
        """Runs of adjacent tokens that are targets, and of those that are not."""
        pairs = groupby(zip(self.learned, self.ids, strict=True), key=lambda pair: pair[0])
        return [(learned, [number for _, number in run]) for learned, run in pairs]


def mask(subject: Subject) -> Measured:
    """Check that each run of targets is a whole turn of the source with its end token."""
    tokenizer = subject.data.tokenizer()
    documents: list[Document] = []
    wrong: list[str] = []
    claims: dict[str, None] = {}
    learns_all = DataRecipe.from_spec(subject.spec).data.train_on == "all"
    for data in subject.data.by_source():
        of_source = list(_documents(data))
        documents += of_source
        problems, claim = _wrong(of_source, data, tokenizer, learns_all=learns_all)
        wrong += problems
        claims[claim] = None
    assert documents, "the sample has no document"
    detail = f"documents of {len(documents)} with wrong targets or two BOS tokens; {'; '.join(claims)}"
    return Measured(
        float(len(wrong)), 0.0, detail, wrong[0] if wrong else None, shown=tuple(_pieces(documents, tokenizer))
    )


def _wrong(
    documents: list[Document], data: PreparedData, tokenizer: PreTrainedTokenizerBase, *, learns_all: bool
) -> tuple[list[str], str]:
    """What is wrong with the documents of a source, and the claim that they were checked against."""
    wrong = [problem for document in documents if (problem := _begins_twice(document, tokenizer))]
    form = data.manifest.format
    if learns_all:
        context = _context(data) if form in ("chat", "alpaca") else set[str]()
        wrong += [problem for document in documents if (problem := _not_all(document, tokenizer, context))]
        return wrong, "all tokens except the first of a document, and turns of weight 0, are targets"
    if form not in _FORMATS:
        return wrong, "documents begin once; 'reference' checks the targets of pairs"
    expected = _expected_texts(data)
    wrong += [problem for document in documents if (problem := _unexpected(document, data, tokenizer, expected))]
    wrong += _missing(documents, data, expected)
    texts = "completions" if form == "prompt_completion" else "turns that data.train_on names"
    return wrong, f"targets are the {texts} with their end tokens"


def _documents(data: PreparedData) -> Iterator[Document]:
    """The documents of all training and validation rows, without padding."""
    for rows in (data.train, data.validation):
        for index in range(len(rows)):
            yield from _split(rows[index])


def _split(row: Row) -> Iterator[Document]:
    begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
    for begin, end in zip(begins, [*begins[1:], row["input_ids"].numel()], strict=True):
        learned = (row["labels"][begin:end] != IGNORE_INDEX).tolist()
        # Only padding is a document without targets.
        if any(learned):
            yield Document(row["input_ids"][begin:end].tolist(), learned)


def _begins_twice(document: Document, tokenizer: PreTrainedTokenizerBase) -> str | None:
    begin = tokenizer.bos_token_id
    if begin is not None and document.ids[:2] == [begin, begin]:
        return f"a document begins with {tokenizer.bos_token!r} twice: {_text(document.ids[:16], tokenizer)!r}"
    return None


def _not_all(document: Document, tokenizer: PreTrainedTokenizerBase, context: set[str]) -> str | None:
    # The first token has none before it.
    left = Document(document.ids[1:], document.learned[1:])
    for learned, ids in left.runs():
        if not learned and not any(_text(run, tokenizer).strip() in context for run in (ids, ids[:-1])):
            return f"tokens are not targets: {_text(ids[:16], tokenizer)!r}"
    return None


def _context(data: PreparedData) -> set[str]:
    """The assistant's turns of weight 0 in the source."""
    recipe = DataRecipe.model_validate(data.manifest.recipe)
    found: set[str] = set()
    for row in islice(open_source(recipe).rows(), recipe.data.max_samples):
        try:
            chats = chats_of(data.manifest.format, data.manifest.columns, row, recipe.data)
        except RowError:
            continue
        found |= {
            str(message.get("content", "")).strip()
            for chat in chats
            for message in chat
            if not message.get("weight", 1)
        }
    return found


class ExpectedTexts(NamedTuple):
    """Texts that the model has to write according to the source: whole turns, and parts of turns with other content."""

    whole: set[str]
    parts: set[str]
    turns: int


def _expected_texts(data: PreparedData) -> ExpectedTexts:
    recipe = DataRecipe.model_validate(data.manifest.recipe)
    whole: set[str] = set()
    parts: set[str] = set()
    turns = 0
    for row in islice(open_source(recipe).rows(), recipe.data.max_samples):
        try:
            for text, is_all in _turns(row, data, recipe.data):
                (whole if is_all else parts).add(text.strip())
                turns += 1
        except RowError:
            # Counted as skipped when the data was prepared, which `_missing` allows for.
            continue
    return ExpectedTexts(whole, parts, turns)


def _turns(row: SourceRow, data: PreparedData, section: Data) -> Iterator[tuple[str, bool]]:
    """The text of each turn of a row, and whether the turn is nothing else, such as reasoning or tool calls."""
    if data.manifest.format == "prompt_completion":
        text = row.text(data.manifest.columns[1])
        if text.strip():
            yield text, True
        return
    for messages in chats_of(data.manifest.format, data.manifest.columns, row, section):
        for index in learned_messages(messages, section.train_on or "completions"):
            yield str(messages[index].get("content", "")), not _has_more(messages[index])


def _has_more(message: dict[str, Any]) -> bool:
    return bool(set(message) - {"role", "content", "weight"})


def _unexpected(
    document: Document, data: PreparedData, tokenizer: PreTrainedTokenizerBase, expected: ExpectedTexts
) -> str | None:
    ends = set(data.manifest.stop_token_ids)
    cut = data.manifest.truncated > 0 or data.manifest.split_long > 0
    for learned, ids in document.runs():
        if not learned:
            continue
        if ids[-1] not in ends:
            if cut and document.learned[-1] and document.ids[-len(ids) :] == ids:
                # Truncated at the end of the row.
                continue
            return f"targets without an end token: …{_text(ids[-12:], tokenizer)!r}"
        text = _text(ids[:-1], tokenizer).strip()
        if text not in expected.whole and not any(part in text for part in expected.parts) and not cut:
            return f"a run of targets is not a turn of the source: {text[:160]!r}"
    return None


def _missing(documents: list[Document], data: PreparedData, expected: ExpectedTexts) -> list[str]:
    manifest = data.manifest
    if any(manifest.skipped.values()) or manifest.truncated or manifest.split_long:
        return []
    found = sum(learned for document in documents for learned, _ in document.runs())
    if found == expected.turns:
        return []
    return [f"the source has {expected.turns} turns, but there are {found} runs of targets"]


def _pieces(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The beginning of a document with targets and other tokens, or of the first document."""
    shown = next((document for document in documents if not all(document.learned[1:])), documents[0])
    left = _SHOWN
    for learned, ids in shown.runs():
        text = _text(ids, tokenizer)
        yield text[:left], learned
        left -= len(text)
        if left <= 0:
            return


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
