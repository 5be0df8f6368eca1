"""The parts of a source: what one process prepares at a time.

The source alone decides them, not the number of processes, so that the prepared rows do not depend on it. A part is
about `PART_BYTES` of text: a range of a large file of lines, row groups of a Parquet file, or several small files. A
small source is one part. So are sources that cannot be divided: those of the Hub, the built-in one, and the first
samples of any, which `data.max_samples` counts in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from tasks.runtime.data.reading.readers import Span, extension, is_compressed, is_text, naming_file, read
from tasks.runtime.data.reading.rows import Row
from tasks.runtime.data.reading.sources import Files, Source

PART_BYTES = 1 << 26
# Text per byte of a compressed file, and of a Parquet file, roughly.
_COMPRESSION = 4


class Piece(NamedTuple):
    """A file by its number in the source, or a span of it."""

    file: int
    span: Span | None = None


class Part(NamedTuple):
    """place: its number in the source. pieces: its files, in order; None for the whole source."""

    place: int
    pieces: tuple[Piece, ...] | None

    def rows(self, source: Source) -> Iterator[Row]:
        """The rows of this part of its source, in order."""
        if self.pieces is None:
            yield from source.rows()
            return
        assert isinstance(source, Files)
        for number, span in self.pieces:
            filesystem, path = source.found[number]
            yield from read(filesystem, path, source.texts, span)


def divide(source: Source, *, max_samples: int | None, seed: int, part_bytes: int) -> list[Part]:
    """The parts of a source, in the order in which they are prepared and first read: shuffled with the seed.

    Raises ValueError, which names the file, when one cannot be read.
    """
    if not isinstance(source, Files) or max_samples is not None:
        return [Part(0, None)]
    groups = list(_grouped(_pieces(source, part_bytes), part_bytes))
    if len(groups) == 1:
        return [Part(0, None)]
    parts = [Part(place, group) for place, group in enumerate(groups)]
    random.Random(seed).shuffle(parts)  # noqa: S311  # order, not secrecy
    return parts


def _grouped(pieces: Iterable[tuple[Piece, int]], part_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Consecutive pieces, given with their bytes, that together have at least `part_bytes`."""
    group: list[Piece] = []
    total = 0
    for piece, size in pieces:
        # A small rest is left to the next part, a large piece is one of its own.
        if group and total + size > 2 * part_bytes:
            yield tuple(group)
            group, total = [], 0
        group.append(piece)
        total += size
        if total >= part_bytes:
            yield tuple(group)
            group, total = [], 0
    if group:
        yield tuple(group)


def _pieces(source: Files, part_bytes: int) -> Iterator[tuple[Piece, int]]:
    """The files of a source, the large ones in spans, with the bytes of text in each."""
    for number, (filesystem, path) in enumerate(source.found):
        with naming_file(path):
            size = int(filesystem.size(path) or 0)
            plain = not is_compressed(path)
            if plain and extension(path) == ".parquet" and size * _COMPRESSION > part_bytes:
                for span, text in _row_groups(filesystem, path, part_bytes):
                    yield Piece(number, span), text
            elif plain and size > 2 * part_bytes and _has_lines(source, filesystem, path):
                with open(path, "rb") as file:
                    for span in _line_spans(file, size, part_bytes):
                        yield Piece(number, span), span.end - span.begin
            else:
                packed = not plain or extension(path) == ".parquet"
                yield Piece(number), size * _COMPRESSION if packed else size


def _has_lines(source: Files, filesystem: Any, path: str) -> bool:
    """Whether each line of a file is a row. A file elsewhere is not read to count its lines."""
    if not isinstance(filesystem, LocalFileSystem):
        return False
    lines_of_text = source.texts.unit == "line" and source.texts.separator is None
    return extension(path) == ".jsonl" or (is_text(path) and lines_of_text)


def _line_spans(file: IO[bytes], size: int, part_bytes: int) -> Iterator[Span]:
    begin, first = 0, 1
    while begin < size:
        lines, left = 0, part_bytes
        while left and (data := file.read(min(left, 1 << 22))):
            lines += data.count(b"\n")
            left -= len(data)
        # To the end of the line.
        while data and not data.endswith(b"\n") and (data := file.readline(1 << 22)):
            lines += data.count(b"\n")
        yield Span(begin, file.tell(), first)
        begin, first = file.tell(), first + lines


def _row_groups(filesystem: Any, path: str, part_bytes: int) -> Iterator[tuple[Span, int]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with filesystem.open(path, "rb") as file:
            metadata = ParquetFile(file).metadata
    except ArrowException as error:
        raise OSError(str(error)) from error
    begin, first, rows, size = 0, 1, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows, size = rows + group.num_rows, size + group.total_byte_size
        if size >= part_bytes or number == metadata.num_row_groups - 1:
            yield Span(begin, number + 1, first), size
            begin, first, rows, size = number + 1, first + rows, 0, 0
