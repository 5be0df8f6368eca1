"""The images and audio of a row in its rendered chats: as the tokens of the model's processor, and as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.formats.documents import Segment
from tasks.runtime.data.media.kinds import Item, MediaCounts, Medium
from tasks.runtime.data.media.media_processor import MediaProcessor
from tasks.runtime.data.reading.rows import Row, RowError

Processor = Callable[[Medium], MediaProcessor]
"""Gives the processor of a multimodal model, which it loads at the first call."""


class Drawn(NamedTuple):
    """A rendered chat as segments, none without text, and the bytes of its images or audio."""

    segments: list[Segment]
    media: tuple[bytes, ...] = ()


class RowMedia:
    """Puts images and audio of chats into their rendered texts, as the tokens that the model's processor has."""

    def __init__(self, data: Data, processor: Processor | None) -> None:
        self.counts = MediaCounts()
        self.multimodal = processor is not None
        self._data = data
        self._processor = processor
        self.used: MediaProcessor | None = None

    @property
    def token_ids(self) -> set[int]:
        """Ids of the tokens that stand for images or audio so far."""
        return self.used.token_ids if self.used else set()

    def processor(self, items: list[Item], row: Row) -> MediaProcessor:
        """The processor of the model, for a row with images or audio. Raises ValueError if the model has none."""
        for medium in dict.fromkeys(item.medium for item in items):
            if self._processor is None:
                raise ValueError(
                    f"{row.where}: the row has {medium.several}, but the model is no {medium.model}; choose another "
                    f"one, or name the column of {medium.several} in data.ignore_columns"
                )
            self.used = self._processor(medium)
        assert self.used is not None
        return self.used

    def draw(self, documents: list[list[Segment]], items: list[Item], row: Row) -> list[Drawn]:
        """The documents of a chat with its images or audio; one with the beginning of the chat has the first of them.

        Raises:
            RowError: one cannot be read or is refused by the model's processor, or the template has other places for
                them than the chat.
            ValueError: the model takes none.
        """
        if not items:
            return [Drawn(segments) for segments in documents]
        processor = self.processor(items, row)
        reader = processor.reader(self._data, self.counts)
        contents, opened = zip(*(reader.read(item.value, row) for item in items), strict=True)
        try:
            texts = processor.replacements(list(opened))
        # Some take no images that are hundreds of times as wide as high.
        except ValueError as error:
            raise RowError(
                f"{row.where}: the processor of the model refuses the row's {processor.medium.several}: {error}"
            ) from error
        self.counts.reduced += processor.reduced(list(opened))
        counts = [_places(segments, processor.placeholder) for segments in documents]
        if (most := max(counts, default=0)) != len(items):
            raise RowError(
                f"{row.where}: the chat template writes {processor.placeholder!r} {most} times for "
                f"{len(items)} {processor.medium.several}; set data.chat_template to a template that writes it once "
                "for each"
            )
        return [
            Drawn(_with_replacements(segments, processor.placeholder, texts), contents[:count])
            for segments, count in zip(documents, counts, strict=True)
        ]


def _places(segments: list[Segment], placeholder: str) -> int:
    return sum(segment.text.count(placeholder) for segment in segments if segment.control)


def _with_replacements(segments: list[Segment], placeholder: str, texts: list[str]) -> list[Segment]:
    left = iter(texts)
    return [
        segment._replace(text=re.sub(re.escape(placeholder), lambda _: next(left), segment.text))
        if segment.control
        else segment
        for segment in segments
    ]
