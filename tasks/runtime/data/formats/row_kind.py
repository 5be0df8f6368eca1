"""Whether the rows of a source are texts or messages, which its first rows decide; rows of the other kind are refused.

JSON of messages counts as messages, which a question and its answer are not: format alpaca makes a chat of their texts.
There, and of objects that look like messages but have other keys, JSON is learned as text only if `data.format` says
so. In columns that are read as text alone, it is text with a warning. Other JSON is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.json_chat import is_json_chat, keys_of_no_chat
from tasks.runtime.data.chat.messages import is_text, is_transcript
from tasks.runtime.data.formats.columns import CHATS, INPUTS, PREFERENCES, optional_columns, system_columns
from tasks.runtime.data.reading.rows import Row, RowError

TEXTS = ("prompt_completion", "prompt", "preference")
"""Formats of texts; the same columns may hold messages."""


def holds_messages(name: str, columns: tuple[str, ...], values: dict[str, Any], data: Data) -> str | None:
    """The column of a row that holds messages, if there is one; name: of the format, one of `TEXTS`."""
    for column in reversed(columns):
        value = values.get(column)
        is_answer = name in PREFERENCES and column in columns[-2:]
        if isinstance(value, list | dict) or (is_answer and is_transcript(value)) or is_json_chat(value, data):
            return column
    return None


def have_messages(columns: Iterable[str], rows: Iterable[Row], data: Data) -> bool:
    """Whether a column of some row holds messages, or their JSON: these are what `data.message_keys` is for."""
    values = [row.values.get(column) for row in rows if isinstance(row.values, dict) for column in columns]
    return any(isinstance(value, list | dict) or is_json_chat(value, data) for value in values)


def json_read_as_text(name: str, columns: tuple[str, ...], rows: Sequence[Row], data: Data) -> Iterator[str]:
    """For each column of some rows that holds the JSON of messages, but is read as text: a warning with the way out.

    name: of the format.
    """
    ways_out: dict[str, str] = {}
    if data.template is not None:
        read = dict.fromkeys((*columns[:-1], *optional_columns(name, columns, data)))
        ways_out = dict.fromkeys(read, "is text for data.template; to read messages, leave data.template out")
    elif name == "text" and data.format == "auto":
        ways_out[columns[0]] = (
            f"is learned as text; to read messages, set data.format to 'chat' and data.messages_column to "
            f"{columns[0]!r}; if text is meant, set data.format to 'text'"
        )
    elif name in CHATS:
        system = [column for column in system_columns(data) if column not in (*columns, *data.ignore_columns)]
        ways_out = dict.fromkeys(system, "is the text of a system message; give the content of the message instead")
    for column, way_out in ways_out.items():
        for row in rows:
            if isinstance(row.values, dict) and is_json_chat(row.values.get(column), data):
                yield f"{row.where}: column {column!r} holds the JSON of messages, which {way_out}"
                break


def require_known_objects(name: str, columns: tuple[str, ...], row: Row, data: Data) -> None:
    """Raise RowError for a text that is the JSON of objects that look like messages, unless `data.format` is given.

    name: of the format of texts.
    """
    for column in columns if data.format == "auto" and isinstance(row.values, dict) else ():
        if keys := keys_of_no_chat(row.values.get(column), data):
            named = ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
            raise RowError(
                f"{row.where}: column {column!r} holds the JSON of objects with {named}, of which none is a message "
                "with role and content; if they are messages, map their keys by data.message_keys; to read them as "
                f"text, set data.format to {name!r}"
            )


def require_kind(name: str, columns: tuple[str, ...], row: Row, data: Data) -> None:
    """Raise RowError for messages in a row of a format of texts, or for texts in one whose format is of messages."""
    if not isinstance(row.values, dict):
        return
    if name == "alpaca":
        _require_texts(columns, row, data)
        require_known_objects(name, columns, row, data)
    elif name in TEXTS:
        if column := holds_messages(name, columns, row.values, data):
            raise RowError(
                f"{row.where}: column {column!r} holds messages, but by the first rows the format is {name}, of texts; "
                "give all rows as texts, or all as messages"
            )
        require_known_objects(name, columns, row, data)
    elif texts := _judged(name, columns, data):
        require_known_objects(texts, columns, row, data)
        answers = [row.values.get(column) for column in (columns[-2:] if name in PREFERENCES else columns[-1:])]
        # An empty answer is left out, whatever the kind.
        is_empty = all(isinstance(answer, str) and not answer.strip() for answer in answers)
        if not is_empty and all(is_text(row.values.get(column), data) for column in columns):
            raise RowError(
                f"{row.where}: column {columns[-1]!r} holds a text, but by the first rows the format is {name}, of "
                "messages; give all rows as messages, or all as texts"
            )


def _require_texts(columns: tuple[str, ...], row: Row, data: Data) -> None:
    """Raise RowError for messages in a question or its answer, or for their JSON unless `data.format` is given."""
    question, answer = columns
    for column in (*columns, *INPUTS):
        value = row.values.get(column)
        is_json = isinstance(value, str)
        if column in data.ignore_columns or (is_json and data.format != "auto"):
            continue
        if is_json_chat(value if is_json else json.dumps(value, default=str), data):
            as_text = "; to learn their JSON as text, set data.format to 'alpaca'" if is_json else ""
            raise RowError(
                f"{row.where}: column {column!r} holds messages, but format alpaca makes a chat of texts; to read "
                f"{question!r} and {answer!r} as messages, set data.format to 'prompt_completion', data.prompt_column "
                f"to {question!r} and data.completion_column to {answer!r}{as_text}"
            )


def _judged(name: str, columns: tuple[str, ...], data: Data) -> str | None:
    """The format of texts with these columns, if it was the first rows' messages that made it the one of `name`."""
    if name == "chat" and len(columns) == 2:
        return "prompt_completion"
    kinds = {"prompt_chat": "prompt", "preference_chat": "preference"}
    # Texts in columns of other names, such as 'question', are read as a chat.
    return kinds.get(name) if data.format != name and columns[0] == (data.prompt_column or "prompt") else None
