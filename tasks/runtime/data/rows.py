"""What a source yields, and how a row that cannot be used is told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class RowError(ValueError):
    """One row cannot be used. `data.invalid` decides whether that ends the preparation or is counted."""


@dataclass(frozen=True)
class Row:
    """One row of a source.

    `where` names it to a person (`/data/train.jsonl line 17`). `problem` tells why it could not be read; then there
    are no `values`.
    """

    where: str
    values: Any
    problem: str | None = None

    def fields(self) -> dict[str, Any]:
        """The columns of the row. Raises RowError when it was not readable or is no object."""
        if self.problem is not None:
            raise RowError(f"{self.where}: {self.problem}")
        if not isinstance(self.values, dict):
            raise RowError(f"{self.where}: an object with columns was expected, not {describe_type(self.values)}")
        return self.values

    def text(self, column: str) -> str:
        """The text in `column`. Raises RowError when it is missing, not text, or holds half a character."""
        value = self.value(column)
        if not isinstance(value, str):
            raise RowError(f"{self.where}: column {column!r} holds {describe_type(value)}, not text")
        require_valid_unicode(value, f"{self.where}: column {column!r}")
        return value

    def value(self, column: str) -> Any:
        """What is in `column`. Raises RowError when the row lacks it."""
        fields = self.fields()
        if column not in fields:
            raise RowError(f"{self.where}: there is no column {column!r}, only {', '.join(map(repr, fields))}")
        return fields[column]


def require_valid_unicode(text: str, where: str) -> None:
    """Raise RowError when the text holds one half of a surrogate pair: JSON can say it, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{where} holds half a character, {text[error.start]!r} after {text[: error.start][-20:]!r}"
        ) from error


def describe_type(value: Any) -> str:
    """The type of a value in words, with the value when it is short."""
    if value is None:
        return "null"
    shown = repr(value)
    return f"{type(value).__name__} {shown}" if len(shown) <= 40 else type(value).__name__


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the name nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
