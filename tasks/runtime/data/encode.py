"""Tokenization of documents to token ids and loss masks.

Each segment is tokenized separately and the ids are concatenated. So the boundary between prompt and completion is a
token boundary, and the prompt has the same tokens as at inference: no token merges the end of a prompt with the start
of its completion. Byte-level tokenizers support this directly. A tokenizer that puts a space before every text, as
SentencePiece does, gets a line break before each later segment, whose tokens are then removed; if the line break merges
with the segment's first characters, another character. A segment that merges with all of them is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tasks.runtime.data.formats import Document
from tasks.runtime.data.rows import RowError

# Tried in this order. Most vocabularies have the last one as bytes only, which merge with nothing.
_ANCHORS = ("\n", "x", "0", "¬")
_PROBE = "a"


@dataclass(frozen=True)
class Encoded:
    """A tokenized document: `ids` [n], int32; `targets` [n], bool, the tokens that carry loss.

    The first token is never a target, because no token precedes it. `completion_span` is the range of the last segment
    that the model generates.
    """

    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    completion_span: tuple[int, int]

    def __len__(self) -> int:
        return len(self.ids)


class Encoder:
    """Tokenizes documents. learn_all: every token carries loss, not only those that the model generates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, learn_all: bool) -> None:
        self._tokenizer = tokenizer
        self._learn_all = learn_all
        # Ids of the last tokens of the assistant's turns in chats so far.
        self.turn_end_ids: set[int] = set()
        self.prefix_ids = self._prefix_ids()
        self._concatenates = self._decodes_concatenated(self._tokenize([_PROBE])[0])
        self._anchors = self._known_anchors()
        if not self._concatenates and not self._decodes_concatenated(self._continue([_PROBE])[0]):
            raise ValueError(
                "the tokenizer's tokens depend on the text before them, so prompts cannot be separated from "
                "completions; set model.tokenizer to another tokenizer"
            )

    def encode(self, documents: list[Document]) -> list[Encoded]:
        """Encode documents in order. Raises RowError when a document cannot be split into segments."""
        first = self._tokenize([document.segments[0].text for document in documents])
        continuations = iter(
            self._continue([segment.text for document in documents for segment in document.segments[1:]])
        )
        return [
            self._concatenate(document, [first_ids, *(next(continuations) for _ in document.segments[1:])])
            for document, first_ids in zip(documents, first, strict=True)
        ]

    def _concatenate(self, document: Document, pieces: list[list[int]]) -> Encoded:
        # A text that was rendered beforehand may contain the leading special tokens; they must not be added twice.
        has_prefix = pieces[0][: len(self.prefix_ids)] == self.prefix_ids
        ids: list[int] = [] if document.has_special_tokens or has_prefix else list(self.prefix_ids)
        targets = [False] * len(ids)
        completion_span = (0, 0)
        for segment, piece in zip(document.segments, pieces, strict=True):
            if segment.generated:
                completion_span = (len(ids), len(ids) + len(piece))
                if document.has_special_tokens and piece:
                    self.turn_end_ids.add(piece[-1])
            ids += piece
            targets += [segment.generated] * len(piece)
        if not document.has_special_tokens and ids[-1:] != [self._tokenizer.eos_token_id]:
            ids.append(self._tokenizer.eos_token_id)
            targets.append(True)
        learned = np.ones(len(ids), dtype=np.bool_) if self._learn_all else np.array(targets, dtype=np.bool_)
        learned[:1] = False
        return Encoded(np.array(ids, dtype=np.int32), learned, completion_span)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _continue(self, texts: list[str]) -> list[list[int]]:
        """Tokens of texts that continue another one. Raises RowError for a text that merges with every anchor."""
        if self._concatenates:
            return self._tokenize(texts)
        pieces: dict[int, list[int]] = {}
        left = list(range(len(texts)))
        for anchor, begin in self._anchors.items():
            for index, ids in zip(left, self._tokenize([anchor + texts[index] for index in left]), strict=True):
                if ids[: len(begin)] == begin:
                    pieces[index] = ids[len(begin) :]
            left = [index for index in left if index not in pieces]
        if left:
            raise RowError(
                f"the tokenizer's tokens of {texts[left[0]][:20]!r} depend on the text before them, so the prompt "
                "cannot be separated from the completion"
            )
        return [pieces[index] for index in range(len(texts))]

    def _known_anchors(self) -> dict[str, list[int]]:
        """Anchors and their token ids, without unknown ones: these may merge with other unknown characters."""
        tokens = dict(zip(_ANCHORS, self._tokenize(list(_ANCHORS)), strict=True))
        return {anchor: ids for anchor, ids in tokens.items() if self._tokenizer.unk_token_id not in ids}

    def _decodes_concatenated(self, following: list[int]) -> bool:
        joined = self._tokenize([_PROBE])[0] + following
        return str(self._tokenizer.decode(joined, clean_up_tokenization_spaces=False)) == _PROBE * 2

    def _prefix_ids(self) -> list[int]:
        """Ids that the tokenizer puts before a text by default: usually the beginning-of-sequence token, or none."""
        plain = self._tokenize([_PROBE])[0]
        whole = self._tokenizer([_PROBE], verbose=False)["input_ids"][0]
        return list(whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)])


def split_long(encoded: Encoded, length: int) -> list[Encoded]:
    """Split into pieces of at most `length` tokens. Each begins with the previous piece's last token.

    That token carries no loss there. So every target stays a target, and each has a token before it.
    """
    if len(encoded) <= length:
        return [encoded]
    starts = range(0, len(encoded) - 1, length - 1)
    return [_slice(encoded, start, start + length) for start in starts]


def truncate(encoded: Encoded, length: int) -> Encoded:
    """The first `length` tokens."""
    return _slice(encoded, 0, length)


def _slice(encoded: Encoded, start: int, stop: int) -> Encoded:
    ids, targets = encoded.ids[start:stop], encoded.targets[start:stop].copy()
    targets[:1] = False
    begin, end = (min(max(bound - start, 0), len(ids)) for bound in encoded.completion_span)
    return Encoded(ids, targets, (begin, end))
