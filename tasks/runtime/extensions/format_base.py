"""Base classes of data formats of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class TextSegment(NamedTuple):
    """A piece of a text. `learned`: the model has to generate it, so it carries loss."""

    text: str
    learned: bool


class TextFormat(ABC):
    """Turns a row into pieces of text. The end-of-sequence token follows the last one."""

    columns: tuple[str, ...] = ()
    """Columns that every row has to have."""

    @abstractmethod
    def segments(self, row: Mapping[str, Any]) -> Sequence[TextSegment]:
        """The pieces of the row's text, in order; none to skip the row, which is counted as empty.

        Raises ValueError if the row cannot be used; `data.invalid` decides what happens then.
        """


class ChatFormat(ABC):
    """Turns a row into messages, which the chat template renders. What the assistant says carries loss."""

    columns: tuple[str, ...] = ()
    """Columns that every row has to have."""

    @abstractmethod
    def messages(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The messages of the row, `{"role": ..., "content": ...}`; none to skip the row, which is counted as empty.

        Raises ValueError if the row cannot be used; `data.invalid` decides what happens then.
        """
