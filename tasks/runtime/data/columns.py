"""Columns that a format leaves unread. Those that change what a row means are refused until mapped or ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata_platform.spec.data import Data
from tasks.runtime.data.messages import HISTORY, INPUT
from tasks.runtime.data.rows import Row, describe_type
from tasks.runtime.data.tools import COLUMN

CHATS = ("chat", "alpaca", "preference_chat")
"""Formats whose rows become messages."""

_RAW = ("prompt_completion", "preference")
_ALPACA = "set data.format to 'alpaca'"


def _is_given(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _is_negative(value: Any) -> bool:
    return value == 0 or (isinstance(value, str) and value.strip().lower() in ("0", "false", "no"))


def _is_other_than_one(value: Any) -> bool:
    return value not in (1, "1", "1.0")


# Column: in which formats and with which values it changes what a row means, what it says, and the way out.
_MEANINGS: dict[str, tuple[tuple[str, ...], Callable[[Any], bool], str, str]] = {
    INPUT: (_RAW, _is_given, "is a part of the prompt", _ALPACA),
    HISTORY: ((*_RAW, "chat", "preference_chat"), _is_given, "holds earlier turns of the chat", _ALPACA),
    "system": (
        (*_RAW, *CHATS),
        _is_given,
        "holds a system message",
        "set data.system_column to it, in a format of chats",
    ),
    # KTO's label of a single answer.
    "label": (
        (*_RAW, *CHATS),
        _is_negative,
        "marks a bad answer, which would be learned as good",
        "drop such rows",
    ),
    "train": ((*_RAW, *CHATS), _is_negative, "excludes the row from training", "drop such rows"),
    "weight": ((*_RAW, *CHATS), _is_other_than_one, "weighs the row", "drop the column"),
    "mask": ((*_RAW, *CHATS), _is_given, "says which tokens carry loss", "give messages with weight 0 instead"),
    "functions": (CHATS, _is_given, "holds the tools of the chat", f"rename it to {COLUMN!r}"),
    "chat_template_kwargs": (CHATS, _is_given, "changes how the chat is rendered", "drop the column"),
}
_SYNONYMS = {
    "system_prompt": "system", "system_message": "system", "kto_tag": "label", "loss": "train", "masks": "mask",
    "loss_mask": "mask", "completion_mask": "mask", "assistant_masks": "mask",
}  # fmt: skip


def columns_of(rows: list[Row]) -> list[str]:
    """Names of the columns of rows, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows if isinstance(row.values, dict) for name in row.values))


class Unread:
    """The columns that a format leaves unread.

    read: the columns that the format needs. Chats read `data.system_column` and `tools`, too, unless ignored.
    """

    def __init__(self, name: str, read: tuple[str, ...], data: Data) -> None:
        self.read = {*read, *_optional_columns(name, data)}
        meanings = {**_MEANINGS, **{synonym: _MEANINGS[known] for synonym, known in _SYNONYMS.items()}}
        meanings[data.system_column] = _MEANINGS["system"]
        self._meanings = {
            column: meaning
            for column, meaning in meanings.items()
            if name in meaning[0] and column not in self.read and column not in data.ignore_columns
        }
        self._format = name
        self._data = data

    def without_effect(self) -> list[str]:
        """Fields of `data` that were set to the name of a column which the format does not read."""
        fields = {field: info.default for field, info in Data.model_fields.items() if field.endswith("_column")}
        given = {field: getattr(self._data, field) for field in fields}
        unread = {*given.values()} - self.read - {*self._data.ignore_columns}
        return [f"{field} {value!r}" for field, value in given.items() if value != fields[field] and value in unread]

    def require_harmless(self, row: Row) -> None:
        """Raise ValueError if a column that is not read changes what the row means."""
        if not isinstance(row.values, dict):
            return
        for column in self._meanings.keys() & row.values.keys():
            _, changes, meaning, way_out = self._meanings[column]
            value = row.values[column]
            if value is not None and changes(value):
                raise ValueError(
                    f"{row.where}: column {column!r} holds {describe_type(value)}; it {meaning}, and format "
                    f"{self._format} does not read it: {way_out}, or name {column!r} in data.ignore_columns"
                )


def keys_in(value: Any) -> set[str]:
    """Keys of all mappings in a value, at any depth."""
    keys: set[str] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            keys |= item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += item
    return keys


def _optional_columns(name: str, data: Data) -> tuple[str, ...]:
    """Columns that a format reads if they are there."""
    if name not in CHATS:
        return ()
    columns = (data.system_column, COLUMN, *((INPUT, HISTORY) if name == "alpaca" else ()))
    return tuple(column for column in columns if column not in data.ignore_columns)
