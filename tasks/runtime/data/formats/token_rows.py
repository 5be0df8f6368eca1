"""The format `tokens`: rows that were tokenized beforehand, as the columns `input_ids` and `labels` have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.runtime.data.formats.documents import Document, Tokens
from tasks.runtime.data.reading.rows import Row, RowError, describe_type

COLUMN, LABELS, MASK = "input_ids", "labels", "attention_mask"
OPTIONAL = (LABELS, MASK)
_IGNORE_INDEX = -100
UNPACK = "give each sample a row of its own, which data.packing packs"
"""What to do about rows that another trainer has packed."""


def token_document(row: Row) -> list[Document]:
    """The document of a row. Without labels every token but the first carries loss; empty if no token does.

    Raises:
        RowError: a column holds no integers, columns differ in length, a label is not its token, or a mask hides one.
    """
    ids = _integers(row, COLUMN)
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        outside = int(ids.min() if ids.min() < 0 else ids.max())
        raise RowError(f"{row.where}: column {COLUMN!r} has {outside}, which is not a token id")
    targets = np.ones(ids.size, dtype=np.bool_)
    if row.fields().get(MASK) is not None:
        mask = _of_length(row, MASK, ids.size)
        if not mask.all():
            raise RowError(f"{row.where}: column {MASK!r} hides tokens; remove the padding from {COLUMN!r}")
        # As axolotl and LLaMA-Factory number packed samples.
        if (mask != 1).any():
            raise RowError(
                f"{row.where}: column {MASK!r} has {mask.max()}: its numbers say that the row packs several samples; "
                f"{UNPACK}"
            )
    if row.fields().get(LABELS) is not None:
        labels = _of_length(row, LABELS, ids.size)
        targets = labels != _IGNORE_INDEX
        if (wrong := np.flatnonzero(targets & (labels != ids))).size:
            at = int(wrong[0])
            raise RowError(
                f"{row.where}: labels[{at}] is {labels[at]}, but input_ids[{at}] is {ids[at]}; a label is the token at "
                f"its own position, or {_IGNORE_INDEX}"
            )
    targets[:1] = False
    if not targets.any():
        return []
    return [Document((), has_special_tokens=True, tokens=Tokens(ids.astype(np.int32), targets))]


def _of_length(row: Row, column: str, length: int) -> npt.NDArray[np.int64]:
    values = _integers(row, column)
    if values.size != length:
        raise RowError(f"{row.where}: column {column!r} has {values.size} entries, but {COLUMN!r} has {length}")
    return values


def _integers(row: Row, column: str) -> npt.NDArray[np.int64]:
    value: Any = row.value(column)
    if isinstance(value, list) and all(type(one) is int for one in value):
        return np.array(value, dtype=np.int64)
    wrong = next((one for one in value if type(one) is not int), None) if isinstance(value, list) else value
    raise RowError(f"{row.where}: column {column!r} holds {describe_type(wrong)}; it must be a list of integers")
