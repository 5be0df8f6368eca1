"""Rows of a source, checks of their columns, and the error of a row that cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class RowError(ValueError):
    """A row cannot be used. `data.invalid` decides whether the preparation fails or counts it as skipped."""


class Skipped(RowError):
    """A row is skipped and counted, whatever `data.invalid` says. reason: of `SKIP_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One row of a source.

    where: its location, for messages: `/data/train.jsonl line 17`.
    problem: why it could not be read; `values` is None then.
    begins, ends: whether the row begins and ends a document; a long text file is read in several rows.
    folder: the folder or URL of its file, which paths in it are relative to; empty if it is from no file.
    """

    where: str
    values: Any
    problem: str | None = None
    begins: bool = True
    ends: bool = True
    folder: str = ""

    def fields(self) -> dict[str, Any]:
        """The row's columns. Raises RowError when it could not be read or is not an object."""
        if self.problem is not None:
            raise RowError(f"{self.where}: {self.problem}")
        if not isinstance(self.values, dict):
            raise RowError(f"{self.where}: an object with columns was expected, not {describe_type(self.values)}")
        return self.values

    def text(self, column: str) -> str:
        """The text in `column`. Raises RowError when it is missing, not text, or not valid Unicode."""
        value = self.value(column)
        if not isinstance(value, str):
            raise RowError(f"{self.where}: column {column!r} holds {describe_type(value)}, not text")
        require_valid_unicode(value, f"{self.where}: column {column!r}")
        return value

    def value(self, column: str) -> Any:
        """The value in `column`. Raises RowError when the row does not have it."""
        fields = self.fields()
        if column not in fields:
            raise RowError(f"{self.where}: there is no column {column!r}, only {', '.join(map(repr, fields))}")
        return fields[column]


def require_valid_unicode(text: str, where: str) -> None:
    """Raise RowError when the text has an unpaired surrogate: JSON can encode one, tokenizers reject it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{where} has an unpaired surrogate, {text[error.start]!r}, after {text[: error.start][-20:]!r}"
        ) from error


def describe_type(value: Any) -> str:
    """The type of a value, for messages, with the value if it is short."""
    if value is None:
        return "null"
    shown = repr(value)
    return f"{type(value).__name__} {shown}" if len(shown) <= 40 else type(value).__name__


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest match of `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
