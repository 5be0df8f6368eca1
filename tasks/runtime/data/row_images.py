"""The images of a row in its rendered chats: as the tokens that the model's processor has for them, and as bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from strata_platform.spec.data import Data
from tasks.runtime.data.documents import Segment
from tasks.runtime.data.image_files import ImageReader
from tasks.runtime.data.image_processor import ImageProcessor
from tasks.runtime.data.rows import Row, RowError

Processor = Callable[[], ImageProcessor]
"""Gives the processor of a vision-language model, which it loads at the first call."""


class Drawn(NamedTuple):
    """A rendered chat as segments, none without text, and the bytes of its images."""

    segments: list[Segment]
    images: tuple[bytes, ...] = ()


class RowImages:
    """Puts the images of chats into their rendered texts, as the tokens that the model's processor has for them."""

    def __init__(self, data: Data, processor: Processor | None) -> None:
        self.reader = ImageReader(data)
        self.multimodal = processor is not None
        self._processor = processor
        self._used: ImageProcessor | None = None

    @property
    def token_ids(self) -> set[int]:
        """Ids of the tokens that stand for the images so far."""
        return self._used.token_ids if self._used else set()

    def processor(self, row: Row) -> ImageProcessor:
        """The processor of the model, for a row with images. Raises ValueError if the model has none."""
        if self._processor is None:
            raise ValueError(
                f"{row.where}: the row has images, but the model is no vision-language model; choose another one, or "
                "name the column of images in data.ignore_columns"
            )
        self._used = self._processor()
        return self._used

    def draw(self, documents: list[list[Segment]], images: list[Any], row: Row) -> list[Drawn]:
        """The documents of a chat with its images; a document with the beginning of the chat has the first ones.

        Raises:
            RowError: an image cannot be read, or the template has other places for images than the chat.
            ValueError: the model takes no images.
        """
        if not images:
            return [Drawn(segments) for segments in documents]
        processor = self.processor(row)
        contents, pictures = zip(*(self.reader.read(image, row) for image in images), strict=True)
        texts = processor.replacements(list(pictures))
        counts = [_places(segments, processor.placeholder) for segments in documents]
        if max(counts, default=0) != len(images):
            raise RowError(
                f"{row.where}: the chat template writes {processor.placeholder!r} {max(counts, default=0)} times for "
                f"{len(images)} images; set data.chat_template to a template that writes it once for each"
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
