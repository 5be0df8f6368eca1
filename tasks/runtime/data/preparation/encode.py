"""Tokenization of documents to token ids and loss masks.

Each segment is tokenized separately and the ids are concatenated. So the boundary between prompt and completion is a
token boundary, and the prompt has the same tokens as at inference: no token merges the end of a prompt with the start
of its completion. Byte-level tokenizers support this directly. A tokenizer that puts a space before every text, as
SentencePiece and some of these do, gets a line break before each later segment, whose tokens are then removed; if the
line break merges with the segment's first characters, another character. A segment that merges with all of them is
rejected.

A long segment is tokenized in pieces that have the tokens of the whole, so that memory does not grow with its length.
Of a document that is far too long for a row, and is not split, only as much is tokenized as shows that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tasks.runtime.data.formats.documents import Document, Segment, Tokens
from tasks.runtime.data.formats.teacher_columns import LOGPROBS, TopTokens
from tasks.runtime.data.reading.rows import RowError
from tasks.runtime.data.reading.text_files import pieces

# Tried in this order. Most vocabularies have the last one as bytes only, which merge with nothing.
_ANCHORS = ("\n", "x", "0", "¬")
_PROBE = "a"
# Characters in one call of the tokenizer, which takes some hundred bytes per token.
_CALL = 1 << 22
# A document of more characters, and of more for each token that a row takes, is tokenized piece by piece first.
_LONG = 1 << 16
_LONG_PER_TOKEN = 8
# Tokens by which the beginning of a document has to be too long: its pieces may have fewer when they are joined.
_MARGIN = 1024

Ids = npt.NDArray[np.int32]
_How = tuple[bool, bool]


@dataclass(frozen=True)
class Encoded:
    """A tokenized document: `ids` [n], int32; `targets` [n], bool, the tokens that carry loss.

    The first token is never a target, because no token precedes it. `completion_span` is the range of the last segment
    that the model generates. `complete`: all of the document was tokenized, not only what shows that it is too long.
    `score`: that of the document. `media`: the bytes of its images or audio in order; `media_end`: the place after
    the last token that stands for one. `top_tokens`: of a teacher, for each target. `columns`: those of the
    document.
    """

    ids: Ids
    targets: npt.NDArray[np.bool_]
    completion_span: tuple[int, int]
    complete: bool = True
    score: float | None = None
    media: tuple[bytes, ...] = ()
    media_end: int = 0
    top_tokens: TopTokens | None = None
    columns: bytes | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Encoder:
    """Tokenizes documents.

    learn_all: every token but those of context carries loss, not only those that the model generates.
    longest: tokens that a row takes, if longer documents are not split.
    media_ids: gives the ids of tokens that stand for images or audio.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        learn_all: bool,
        longest: int | None = None,
        media_ids: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend_of(tokenizer)
        self._media_ids = media_ids
        self._learn_all = learn_all
        self.longest = longest
        # Ids of the last tokens of the assistant's turns in chats so far.
        self.turn_end_ids: set[int] = set()
        self.prefix_ids = self._prefix_ids()
        self._prefix = np.array(self.prefix_ids, dtype=np.int32)
        self._end = np.array([tokenizer.eos_token_id], dtype=np.int32)
        self._concatenates = self._decodes_concatenated(self._tokenize([_PROBE])[0])
        self._anchors = self._known_anchors()
        if not self._concatenates and not self._decodes_concatenated(self._continue([_PROBE])[0]):
            raise ValueError(
                "the tokenizer's tokens depend on the text before them, so prompts cannot be separated from "
                "completions; set model.tokenizer to another tokenizer"
            )

    def encode(self, documents: list[Document]) -> list[Encoded]:
        """Encode documents in order. Raises RowError when a document cannot be split into segments."""
        whole = documents
        documents = [self._beginning(document) for document in whole]
        # Texts by how they are tokenized: whether a document begins with them, and what special tokens in them mean.
        texts: dict[_How, list[str]] = {}
        order: list[list[list[_How]]] = []
        for document in documents:
            begins = document.begins
            order.append([])
            for segment in document.segments:
                order[-1].append([])
                for text in pieces(segment.text):
                    how = (begins, segment.control)
                    texts.setdefault(how, []).append(text)
                    order[-1][-1].append(how)
                    begins = False
        ids = {
            how: iter(self._tokenize(found, control=how[1]) if how[0] else self._continue(found, control=how[1]))
            for how, found in texts.items()
        }
        encoded = [
            _given(document, document.tokens, learn_all=self._learn_all)
            if document.tokens is not None
            else self._concatenate(document, [_joined([next(ids[how]) for how in texts_of]) for texts_of in segments])
            for document, segments in zip(documents, order, strict=True)
        ]
        return [
            one if document is read else replace(one, complete=False)
            for one, document, read in zip(encoded, whole, documents, strict=True)
        ]

    def _beginning(self, document: Document) -> Document:
        """The document, or a beginning that is already longer than a row."""
        characters = sum(len(segment.text) for segment in document.segments)
        # A teacher's tokens are matched with those of the whole document.
        if self.longest is None or document.top_tokens is not None:
            return document
        if characters <= max(_LONG, _LONG_PER_TOKEN * self.longest):
            return document
        tokens, segments = 0, list[Segment]()
        for segment in document.segments:
            read = 0
            for text in pieces(segment.text):
                read += len(text)
                tokens += self._tokenize([text], control=segment.control)[0].size
                if tokens > self.longest + _MARGIN:
                    cut = segment._replace(text=segment.text[:read])
                    return replace(document, segments=(*segments, cut), ends=False)
            segments.append(segment)
        return document

    def _concatenate(self, document: Document, segments: list[Ids]) -> Encoded:
        parts: list[Ids] = []
        targets: list[npt.NDArray[np.bool_]] = []
        adds_special_tokens = not document.has_special_tokens
        # A text that was rendered beforehand may contain the leading special tokens; they must not be added twice.
        if adds_special_tokens and document.begins and segments[0][: self._prefix.size].tolist() != self.prefix_ids:
            parts.append(self._prefix)
            targets.append(np.full(self._prefix.size, self._learn_all))
        length = sum(part.size for part in parts)
        completion_span = (0, 0)
        for segment, ids in zip(document.segments, segments, strict=True):
            if segment.generated:
                # Segments beside each other are one turn.
                begin = completion_span[0] if 0 < completion_span[1] == length else length
                completion_span = (begin, length + ids.size)
                if document.has_special_tokens and ids.size:
                    self.turn_end_ids.add(int(ids[-1]))
            parts.append(ids)
            targets.append(np.full(ids.size, (segment.generated or self._learn_all) and not segment.context))
            length += ids.size
        if adds_special_tokens and document.ends and segments[-1][-1:].tolist() != self._end.tolist():
            parts.append(self._end)
            targets.append(np.ones(1, dtype=np.bool_))
        ids = np.concatenate(parts)
        learned = np.concatenate(targets)
        if document.begins:
            learned[:1] = False
        if not document.media:
            top_tokens = _of_targets(document.top_tokens, learned)
            return Encoded(
                ids, learned, completion_span, score=document.score, top_tokens=top_tokens, columns=document.columns
            )
        stands = np.isin(ids, list(self._media_ids()))
        end = int(np.flatnonzero(stands)[-1]) + 1 if stands.any() else 0
        return Encoded(
            ids, learned & ~stands, completion_span, score=document.score, media=document.media, media_end=end
        )

    def _tokenize(self, texts: list[str], *, control: bool = True) -> list[Ids]:
        """Token ids of each text. control: special tokens that the texts contain are recognized as such."""
        found: list[Ids] = []
        for batch in _batches(texts):
            if self._backend is not None:
                self._backend.encode_special_tokens = not control
                encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
                found += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
                continue
            encoded = self._tokenizer(
                batch,
                add_special_tokens=False,
                return_attention_mask=False,
                split_special_tokens=not control,
                verbose=False,
            )
            found += [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        return found

    def _continue(self, texts: list[str], *, control: bool = True) -> list[Ids]:
        """Tokens of texts that continue another one. Raises RowError for a text that merges with every anchor."""
        if self._concatenates:
            return self._tokenize(texts, control=control)
        found: dict[int, Ids] = {}
        left = list(range(len(texts)))
        for anchor, begin in self._anchors.items():
            continued = self._tokenize([anchor + texts[index] for index in left], control=control)
            for index, ids in zip(left, continued, strict=True):
                if np.array_equal(ids[: begin.size], begin):
                    found[index] = ids[begin.size :]
            left = [index for index in left if index not in found]
        if left:
            raise RowError(
                f"the tokenizer's tokens of {texts[left[0]][:20]!r} depend on the text before them, so the prompt "
                "cannot be separated from the completion"
            )
        return [found[index] for index in range(len(texts))]

    def _known_anchors(self) -> dict[str, Ids]:
        """Anchors and their token ids, without unknown ones: these may merge with other unknown characters."""
        tokens = dict(zip(_ANCHORS, self._tokenize(list(_ANCHORS)), strict=True))
        return {anchor: ids for anchor, ids in tokens.items() if self._tokenizer.unk_token_id not in ids}

    def _decodes_concatenated(self, following: Ids) -> bool:
        """Whether the text of the probe's tokens and of `following` is that of the probe, continued by another one."""
        first = self._tokenize([_PROBE])[0]
        # A byte-level decoder keeps the space that the tokenizer puts before a text.
        begin, whole = (
            str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            for ids in (first, np.concatenate([first, following]))
        )
        return whole == begin + _PROBE

    def _prefix_ids(self) -> list[int]:
        """Ids that the tokenizer puts before a text by default: usually the beginning-of-sequence token, or none."""
        plain = self._tokenize([_PROBE])[0].tolist()
        whole = self._tokenizer([_PROBE], verbose=False)["input_ids"][0]
        return list(whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)])


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The tokenizer of the library `tokenizers` that this one calls and adds nothing to; None without one.

    Called directly, it does not count the characters of each token, which takes a quarter of the time.
    """
    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
    ):
        return None
    # As transformers does in each call: its file may ask for both.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer.backend_tokenizer


def _given(document: Document, tokens: Tokens, *, learn_all: bool) -> Encoded:
    """A document that the user has tokenized."""
    targets = np.arange(tokens.ids.size) > 0 if learn_all else tokens.targets
    found = np.flatnonzero(targets)
    span = (int(found[0]), int(found[-1]) + 1) if found.size else (0, 0)
    top_tokens = _of_targets(document.top_tokens, targets)
    return Encoded(tokens.ids, targets, span, score=document.score, top_tokens=top_tokens)


def _of_targets(top_tokens: TopTokens | None, targets: npt.NDArray[np.bool_]) -> TopTokens | None:
    """A teacher's tokens for each target. Raises RowError unless there are as many as targets, or as tokens."""
    if top_tokens is None:
        return None
    entries, needed = len(top_tokens.token_ids), int(targets.sum())
    if entries not in (needed, targets.size):
        raise RowError(
            f"column {LOGPROBS!r} has {entries} entries, but the row has {targets.size} tokens, of which {needed} "
            "carry loss; it needs an entry for each of them, or for each token"
        )
    found = top_tokens if entries == needed else top_tokens.at(targets)
    if (empty := np.flatnonzero(np.isneginf(found.log_probs).all(axis=1))).size:
        at = int(np.flatnonzero(targets)[empty[0]])
        raise RowError(f"token {at} of the row carries loss, but its entry in column {LOGPROBS!r} is empty")
    return found


def _joined(pieces: list[Ids]) -> Ids:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if characters + len(text) > _CALL and batch:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def join(first: Encoded, second: Encoded) -> Encoded:
    """One document of two parts of it."""
    return Encoded(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.targets, second.targets]),
        (first.completion_span[0], len(first) + second.completion_span[1]),
        first.complete and second.complete,
    )


def split_long(encoded: Encoded, length: int) -> list[Encoded]:
    """Split into pieces of at most `length` tokens. Each begins with the previous piece's last token.

    That token carries no loss there. So every target stays a target, and each has a token before it.
    """
    if len(encoded) <= length:
        return [encoded]
    starts = range(0, len(encoded) - 1, length - 1)
    return [_slice(encoded, start, start + length) for start in starts]


def truncate(encoded: Encoded, length: int) -> Encoded:
    """The first `length` tokens, among which are those of all images and audio."""
    assert encoded.media_end <= length
    return replace(_slice(encoded, 0, length), media=encoded.media, media_end=encoded.media_end)


def _slice(encoded: Encoded, start: int, stop: int) -> Encoded:
    ids, targets = encoded.ids[start:stop], encoded.targets[start:stop].copy()
    targets[:1] = False
    begin, end = (min(max(bound - start, 0), len(ids)) for bound in encoded.completion_span)
    top_tokens = encoded.top_tokens
    if top_tokens is not None:
        # A first token that was a target is one of the piece before.
        before = int(encoded.targets[: start + 1].sum())
        top_tokens = top_tokens.at(slice(before, before + int(targets.sum())))
    return Encoded(ids, targets, (begin, end), score=encoded.score, top_tokens=top_tokens)
