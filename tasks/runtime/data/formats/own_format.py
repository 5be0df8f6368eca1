"""Data formats of the user's: classes that `data.format` names as `module:Class` or `entry-point:name`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.messages import Messages, messages_of
from tasks.runtime.data.reading.rows import Row, RowError, require_valid_unicode, suggestion
from tasks.runtime.extensions import ChatFormat, TextFormat, TextSegment
from tasks.runtime.extensions.import_object import code_digest, make_object

_FIELD = "data.format"
_MESSAGES = "messages"


def is_own(format_name: str) -> bool:
    """Whether a value of `data.format` names a class; no built-in format has a colon."""
    return ":" in format_name


def is_own_chat(data: Data) -> bool:
    """Whether `data.format` names a class whose rows become messages."""
    return is_own(data.format) and isinstance(_load(data), ChatFormat)


def own_columns(data: Data, present: Sequence[str]) -> tuple[str, ...]:
    """The columns that the format needs. Raises ValueError if it cannot be made, or if one of them is not `present`."""
    columns = tuple(_load(data).columns)
    for column in columns:
        if column not in present:
            raise ValueError(
                f"{_FIELD} {data.format!r} needs the column {column!r}, but the data has "
                f"{', '.join(map(repr, present))}{suggestion(column, present)}"
            )
    return columns


def own_digest(data: Data) -> str:
    """The digest of the format's code. Raises ValueError if it cannot be made."""
    return code_digest(type(_load(data)))


def own_messages(row: Row, data: Data) -> Messages:
    """The messages that the format makes of a row; empty to skip it. Raises RowError if the row cannot be used."""
    made = _load(data)
    assert isinstance(made, ChatFormat)
    found = _call(made.messages, row, data)
    if not found:
        return []
    return messages_of(Row(row.where, {_MESSAGES: [dict(message) for message in found]}), _MESSAGES)


def own_segments(row: Row, data: Data) -> list[TextSegment]:
    """The pieces that the format makes of a row; empty to skip it. Raises RowError if the row cannot be used."""
    made = _load(data)
    assert isinstance(made, TextFormat)
    segments = [TextSegment(*segment) for segment in _call(made.segments, row, data) if segment[0]]
    for segment in segments:
        require_valid_unicode(segment.text, f"{row.where}: what {data.format} made of it")
    return segments if any(segment.learned and segment.text.strip() for segment in segments) else []


def _call(method: Callable[[dict[str, Any]], Any], row: Row, data: Data) -> Any:
    if not (row.begins and row.ends):
        raise ValueError(
            f"{_FIELD} {data.format!r} takes whole rows, and {row.where} is a part of a long text file; give rows in "
            ".jsonl or .parquet files"
        )
    columns = dict(row.fields())
    for column in _load(data).columns:
        row.value(column)
    try:
        return method(columns)
    except ValueError as error:
        raise RowError(f"{row.where}: {error}") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{_FIELD} {data.format!r}: {method.__name__} raised {type(error).__name__}: {error} for {row.where}, in "
            f"line {last.lineno} of {last.filename}"
        ) from error


def _load(data: Data) -> TextFormat | ChatFormat:
    return _load_once(data.format, json.dumps(data.format_arguments, sort_keys=True))


@cache
def _load_once(name: str, arguments: str) -> TextFormat | ChatFormat:
    bases = (TextFormat, ChatFormat)
    made: TextFormat | ChatFormat = make_object(
        name,
        json.loads(arguments),
        bases,
        field=_FIELD,
        group="strata.formats",
    )
    return made
