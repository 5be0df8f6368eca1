"""Documents of text files: whole files, paragraphs, lines, or what a separator divides.

A file is decoded as it is read. A document that is longer than a part is given in several rows, so that memory holds a
part of it, whatever its size; `cut` says where parts begin. A line is given whole.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, NamedTuple

from tasks.runtime.data.reading.rows import Row

COLUMN = "text"
Bytes = IO[bytes] | io.RawIOBase
PART = 1 << 20
"""Characters of a document in one row, roughly."""

_BLANK_LINES = r"\n\s*\n"
_BYTE_ORDER_MARK = "\ufeff"
# Null characters in a text, by character.
_MOST_NULLS = 0.1


class _Part(NamedTuple):
    """A piece of a document. line: the line of the file that it begins in. ends: whether the document ends with it."""

    text: str
    line: int
    ends: bool


@dataclass(frozen=True)
class TextDocuments:
    """What a document is in a text file: `data.documents` and `data.document_separator`."""

    unit: str = "file"
    separator: str | None = None

    def rows(self, file: Bytes, name: str, *, part: int = PART, first: int = 1) -> Iterator[Row]:
        """Rows with a column `text`. Line breaks become `\\n`, and those around a document are left out.

        first: the number of the first line, where documents are lines.

        Raises OSError, which names the line, for a file that is not UTF-8.
        """
        text = _decoded(file)
        if self.unit == "line":
            for number, line in enumerate(_lines(text), start=first):
                yield Row(f"{name} line {number}", {COLUMN: line})
            return
        separator = _BLANK_LINES if self.unit == "paragraph" else self.separator and re.escape(self.separator)
        yield from _rows(_parts(text, separator, part), name, divided=separator is not None)


WHOLE_FILES = TextDocuments()


def cut(text: str, limit: int) -> int:
    """Where to cut a text after at most `limit` characters, so that its parts have the tokens of the whole text.

    That is before white space after a letter or digit: tokenizers put white space before a word, and never merge a word
    with the white space after it. A text without such a place is cut at the limit.
    """
    for space in ("\n", " "):
        at = text.rfind(space, limit // 2, limit)
        while at > 0:
            if text[at - 1].isalnum():
                return at
            at = text.rfind(space, limit // 2, at)
    return min(limit, len(text))


def pieces(text: str, limit: int = 1 << 16) -> Iterator[str]:
    """The text in pieces of at most `limit` characters."""
    begin = 0
    while len(text) - begin > limit:
        end = begin + cut(text[begin : begin + limit], limit)
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text


def _decoded(file: Bytes) -> Iterator[str]:
    """The file's text in chunks, with `\\n` for every line break."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    line, size = 1, 0
    while True:
        data = file.read(PART)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            # The decoder has kept bytes of a character that the last chunk began.
            at = size + len(data) - len(error.object) + error.start
            number = line + error.object[: error.start].count(b"\n")
            raise OSError(
                f"line {number} is not UTF-8 ({error.reason} at byte {at} of the file); save it as UTF-8"
            ) from error
        if text.count("\0") > len(text) * _MOST_NULLS:
            raise OSError(
                f"{text.count(chr(0)):,} of the {len(text):,} characters from line {line} on are null, as in UTF-16 or "
                "in a file that is not text; save it as UTF-8"
            )
        yield text if size else text.removeprefix(_BYTE_ORDER_MARK)
        line, size = line + text.count("\n"), size + len(data)
        if not data:
            return


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for chunk in chunks:
        first, *rest = chunk.split("\n")
        held.append(first)
        if rest:
            yield "".join(held)
            yield from rest[:-1]
            held = rest[-1:]
    if last := "".join(held):
        yield last


def _parts(chunks: Iterable[str], separator: str | None, size: int) -> Iterator[_Part]:
    """Documents between matches of `separator`, a regular expression, in parts of about `size` characters."""
    pattern = re.compile(separator) if separator else None
    held, line = "", 1
    for chunk in chain(chunks, (None,)):
        held += chunk or ""
        begin = 0
        for match in pattern.finditer(held) if pattern else ():
            # It may be longer in the file.
            if match.end() == len(held) and chunk is not None:
                break
            yield _Part(held[begin : match.start()], line, ends=True)
            line += held.count("\n", begin, match.end())
            begin = match.end()
        # Twice a part is kept, so that no separator is cut of which only the beginning is read.
        while len(held) - begin > 2 * size:
            at = begin + cut(held[begin : begin + size], size)
            yield _Part(held[begin:at], line, ends=False)
            line += held.count("\n", begin, at)
            begin = at
        held = held[begin:]
    yield _Part(held, line, ends=True)


def _rows(parts: Iterable[_Part], name: str, *, divided: bool) -> Iterator[Row]:
    """divided: several documents per file. Blank ones among them are left out."""
    begins = True
    where = name
    for text, line, ends in parts:
        if begins:
            kept = text.lstrip("\n")
            where = f"{name} line {line + len(text) - len(kept)}" if divided else name
            text = kept
        if ends:
            text = text.rstrip("\n")
        if not (divided and begins and ends and not text.strip()):
            yield Row(where, {COLUMN: text}, begins=begins, ends=ends)
        begins = ends
