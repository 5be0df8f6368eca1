"""Log-probabilities of a teacher in the rows: its likeliest tokens at each position, as servers return them.

`logprobs` has an entry for each token of the row, or for each that carries loss: the distribution of that token, given
those before it. Beside `target_token_ids`, entries are lists of log-probabilities and of the tokens that these are of.
Alone, its entries have both, in the forms of OpenAI-compatible servers: a list of objects whose `token` is
`"token_id:5"`, as vLLM and SGLang write it where ids are asked for, or an object with the ids as keys. An entry of a
token without loss may be null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_platform.spec import DataRecipe
from tasks.runtime.data.formats.documents import Document
from tasks.runtime.data.reading.rows import Row, RowError, describe_type, suggestion

if TYPE_CHECKING:
    from tasks.runtime.data.formats.known_formats import ToDocuments

LOGPROBS, TOKEN_IDS = "logprobs", "target_token_ids"
OBJECTIVE = "distill_logprobs"
"""`DataRecipe.objective` of data with a teacher's log-probabilities."""
# Rounding may put the log-probability of a certain token above 0.
_LARGEST = 1e-3
_PREFIX = "token_id:"


class TopTokens(NamedTuple):
    """A teacher's likeliest tokens at N positions: token_ids [N, K], int32, and log_probs [N, K], fp32.

    The ids of a position differ from each other. -inf: the place is empty, and its id that of no other place.
    """

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]

    def at(self, positions: Any) -> TopTokens:
        """Those of some of the positions."""
        return TopTokens(self.token_ids[positions], self.log_probs[positions])

    def widened(self, width: int) -> TopTokens:
        """The same with `width` places each, of which the new ones are empty."""
        count, k = self.token_ids.shape
        if k == width:
            return self
        # Of the first `width` ids of a vocabulary, at most k are taken.
        taken = np.zeros((count, width + 1), dtype=np.bool_)
        np.put_along_axis(taken, np.minimum(self.token_ids, width).astype(np.int64), True, axis=1)
        free = np.argsort(taken[:, :width], axis=1, kind="stable")[:, : width - k].astype(np.int32)
        empty = np.full((count, width - k), -np.inf, dtype=np.float32)
        return TopTokens(np.concatenate([self.token_ids, free], 1), np.concatenate([self.log_probs, empty], 1))


def teacher_columns(recipe: DataRecipe, present: list[str]) -> tuple[str, ...]:
    """The columns with a teacher's log-probabilities, of those `present`; () if the objective reads none.

    Raises ValueError if the objective needs them, and there are none.
    """
    if recipe.objective != OBJECTIVE:
        return ()
    if LOGPROBS not in present:
        raise ValueError(
            f"objective.type 'distill' without objective.teacher needs a column {LOGPROBS!r} with a teacher's "
            f"log-probabilities, but the data has {', '.join(map(repr, present))}{suggestion(LOGPROBS, present)}; "
            "write such data with python -m tasks.runtime.teacher, or set objective.teacher"
        )
    return (LOGPROBS, TOKEN_IDS) if TOKEN_IDS in present else (LOGPROBS,)


def with_top_tokens(build: ToDocuments) -> ToDocuments:
    """Make `build` give each document the teacher's log-probabilities that its row has."""

    def documents(row: Row) -> list[Document]:
        found = build(row)
        if len(found) > 1:
            raise RowError(
                f"{row.where}: the chat template rewrites earlier turns, so that the row becomes {len(found)} "
                f"documents, but column {LOGPROBS!r} is of one; give a row for each answer"
            )
        if any(document.media for document in found):
            raise RowError(
                f"{row.where}: has images or audio, whose tokens column {LOGPROBS!r} does not count; name the teacher "
                "in objective.teacher in place of the column"
            )
        return [replace(document, top_tokens=top_tokens_of(row)) for document in found]

    return documents


def top_tokens_of(row: Row) -> TopTokens:
    """The entries of a row, in order. Raises RowError, which names the entry that does not fit."""
    entries = row.value(LOGPROBS)
    ids = row.fields().get(TOKEN_IDS)
    if not isinstance(entries, list) or not isinstance(ids, list | None):
        wrong = (LOGPROBS, entries) if not isinstance(entries, list) else (TOKEN_IDS, ids)
        raise RowError(f"{row.where}: column {wrong[0]!r} holds {describe_type(wrong[1])}; it must be a list")
    if ids is not None and len(ids) != len(entries):
        raise RowError(f"{row.where}: column {TOKEN_IDS!r} has {len(ids)} entries, but {LOGPROBS!r} has {len(entries)}")
    pairs = zip(entries, entries if ids is None else ids, strict=True)
    read = [
        _entry(f"{row.where}: {LOGPROBS}[{at}]", entry, None if ids is None else given)
        for at, (entry, given) in enumerate(pairs)
    ]
    width = max((len(tokens) for tokens, _ in read), default=0)
    if width == 0:
        raise RowError(f"{row.where}: column {LOGPROBS!r} has no log-probability")
    return _joined(read, width)


def _joined(read: list[tuple[list[int], list[float]]], width: int) -> TopTokens:
    if all(len(tokens) == width for tokens, _ in read):
        found = TopTokens(
            np.array([tokens for tokens, _ in read], dtype=np.int32), np.array([p for _, p in read], dtype=np.float32)
        )
    else:
        parts = [
            TopTokens(np.array([tokens], dtype=np.int32), np.array([p], dtype=np.float32)).widened(width)
            for tokens, p in read
        ]
        found = TopTokens(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return found


def _entry(where: str, entry: Any, ids: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a position; none of either for null."""
    if entry is None:
        return [], []
    tokens, values = (ids, entry) if ids is not None else _parsed(where, entry)
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
        counts = " and ".join(str(len(x)) if isinstance(x, list) else describe_type(x) for x in (values, tokens))
        raise RowError(f"{where}: log-probabilities and tokens must be lists of one length, but are {counts}")
    if wrong := [one for one in tokens if type(one) is not int or not 0 <= one < 2**31]:
        raise RowError(f"{where}: {describe_type(wrong[0])} is not a token id")
    if len(set(tokens)) < len(tokens):
        twice = next(one for one in tokens if tokens.count(one) > 1)
        raise RowError(f"{where}: token {twice} is there twice")
    if wrong := [one for one in values if not _is_log_prob(one)]:
        raise RowError(f"{where}: {describe_type(wrong[0])} is not a log-probability, which is a number up to 0")
    if values and max(values) == -math.inf:
        raise RowError(f"{where}: all tokens have probability 0")
    return tokens, values


def _is_log_prob(value: Any) -> bool:
    # Also false for NaN.
    return type(value) in (int, float) and value <= _LARGEST


def _parsed(where: str, entry: Any) -> tuple[list[Any], list[Any]]:
    """Tokens and log-probabilities of an entry that has both."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(entry, dict):
        # Columnar files give every object the keys of all objects.
        items = ((token, value) for token, value in entry.items() if value is not None)
    elif isinstance(entry, list) and all(isinstance(one, dict) for one in entry):
        items = ((one.get("token_id", one.get("token")), one) for one in entry)
    else:
        raise RowError(
            f"{where} is {describe_type(entry)}; without a column {TOKEN_IDS!r} it must be a list of objects with "
            "'token' and 'logprob', or an object with token ids as keys"
        )
    pairs = [(_token(where, token), _log_prob(value)) for token, value in items]
    return [token for token, _ in pairs], [value for _, value in pairs]


def _log_prob(value: Any) -> Any:
    return value.get("logprob") if isinstance(value, dict) else value


def _token(where: str, token: Any) -> Any:
    if not isinstance(token, str):
        return token
    number = token.removeprefix(_PREFIX)
    if not number.isascii() or not number.isdigit():
        raise RowError(
            f"{where}: {token!r} is a text, which several tokens may have; ask the server for ids, as "
            f"'{_PREFIX}5', with vLLM's return_tokens_as_token_ids"
        )
    return int(number)
