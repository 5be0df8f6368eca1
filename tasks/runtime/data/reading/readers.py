"""Readers for JSON Lines, JSON, Parquet, Arrow, CSV, TSV and text files, through fsspec: a path or a URL.

A file may be compressed. Values are not converted: a number in a text column stays a number, and the text `NA` stays
a text, so that wrong values are found and counted. Line numbers start at 1.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, NamedTuple

from strata_platform.spec.sections.data import COMPRESSIONS, ROW_SUFFIXES, TEXT_SUFFIXES
from tasks.runtime.data.reading.rows import Row
from tasks.runtime.data.reading.text_files import TextDocuments

Reader = Callable[[IO[bytes], str], Iterator[Row]]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The csv module's default limit is 128 KiB; a document may be longer.
_MAX_CSV_FIELD = 1 << 28
# Bytes after decompression: a small compressed file may hold any number of them.
_MAX_LINE = 1 << 28
_INDENTED = re.compile(rb"\{[ \t]*\r?\n")
_MAX_JSON = 1 << 30
# Rows of an Arrow table that are converted together, fewer if they have more bytes: Python's numbers take ten times as
# many.
_ARROW_ROWS = 1024
_ARROW_BYTES = 1 << 24
_UNREADABLE = (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError, csv.Error, zlib.error, lzma.LZMAError)


class Span(NamedTuple):
    """Rows of a file that one process reads.

    begin, end: bytes of a file of lines, or row groups of a Parquet file. first: number of the first line or row.
    """

    begin: int
    end: int
    first: int


def read(filesystem: Any, path: str, texts: TextDocuments, span: Span | None = None) -> Iterator[Row]:
    """Read the rows of one file, by its extension. Raises ValueError, which names the file, when that fails.

    texts: what a document is in a text file.
    span: the rows to read of a file of lines or a Parquet file, which is not compressed; all by default.
    """
    with naming_file(path), _opened(filesystem, path) as file:
        if is_text(path):
            yield from texts.rows(file, path) if span is None else _read_span(file, path, texts, span)
            return
        if span is None:
            rows = _READERS[extension(path)](file, path)
        elif extension(path) == ".parquet":
            rows = _read_parquet(file, path, span)
        else:
            rows = _read_span(file, path, texts, span)
        folder = filesystem.unstrip_protocol(path).split("?", 1)[0].rpartition("/")[0]
        yield from (replace(row, folder=folder) for row in rows)


def _read_span(file: IO[bytes], path: str, texts: TextDocuments, span: Span) -> Iterator[Row]:
    file.seek(span.begin)
    if is_text(path):
        yield from texts.rows(_Raw(file, span.end - span.begin), path, first=span.first)
        return
    yield from _rows_of_lines(_lines(_Raw(file, span.end - span.begin), span.first), path)


def _opened(filesystem: Any, path: str) -> Any:
    """The file, decompressed as it is read."""
    from fsspec.utils import infer_compression

    name = file_name(path)
    if not name.lower().endswith(".zst"):
        return filesystem.open(path, "rb", compression=infer_compression(name))
    # fsspec does not include Zstandard.
    from pyarrow import CompressedInputStream, PythonFile

    return CompressedInputStream(PythonFile(filesystem.open(path, "rb"), mode="r"), "zstd")


def is_compressed(path: str) -> bool:
    """Whether a file is decompressed as it is read, so that no part of it can be read alone."""
    return file_name(path).lower().endswith(COMPRESSIONS)


def is_text(path: str) -> bool:
    """Whether a file holds text, rather than rows with columns."""
    return extension(path) in TEXT_SUFFIXES


def extension(path: str) -> str:
    """The extension without the compression: `.jsonl` for `data/train.jsonl.gz`; empty without one."""
    name = file_name(path).lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return name[name.rfind(".") :] if "." in name else ""


def file_name(path: str) -> str:
    """The last part of a path or URL, without the query."""
    # The query of a URL may contain slashes, and the names of downloaded files may keep the query.
    return (path.split("?", 1)[0] if "://" in path else path).rsplit("/", 1)[-1].split("?", 1)[0]


@contextmanager
def naming_file(path: str, *, field: str = "data.source") -> Iterator[None]:
    """Turn errors of the block into a ValueError that names `path` and the spec's `field`."""
    try:
        yield
    except (*_UNREADABLE, ImportError) as error:
        # Without the number and the path that an error of the system has in its text.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise ValueError(f"{field}: cannot read {path}: {reason}") from error


class _Raw(io.RawIOBase):
    """The bytes of a file that stays open when this is closed.

    Files of other systems than the local one cannot limit a line; `io.BufferedReader` over this can.

    left: bytes to read at most; all by default.
    """

    def __init__(self, file: IO[bytes], left: int | None = None) -> None:
        self._file = file
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer) if self._left is None else min(self._left, len(buffer)))
        buffer[: len(data)] = data
        if self._left is not None:
            self._left -= len(data)
        return len(data)


def _lines(raw: _Raw, first: int = 1) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, of which the first has the number `first`."""
    buffered = io.BufferedReader(raw, 1 << 20)
    for number, line in enumerate(iter(lambda: buffered.readline(_MAX_LINE + 1), b""), start=first):
        if len(line) > _MAX_LINE:
            raise OSError(f"line {number} is longer than {_MAX_LINE >> 20} MiB; cut it into several rows")
        yield number, _decoded(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line, number)


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise OSError(f"line {number} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error


def _read_json_lines(file: IO[bytes], name: str) -> Iterator[Row]:
    yield from _rows_of_lines(_lines(_Raw(file)), name)


def _rows_of_lines(lines: Iterable[tuple[int, str]], name: str) -> Iterator[Row]:
    for number, line in lines:
        if line.strip():
            yield _parsed(line, f"{name} line {number}")


def _parsed(line: str, where: str) -> Row:
    try:
        return Row(where, _JSON.decode(line))
    except RecursionError:
        return Row(where, None, "its objects or lists are nested too deeply")
    # ValueError is also raised for a number with thousands of digits.
    except ValueError as error:
        return Row(where, None, f"not valid JSON: {error}")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject an object with a duplicate key, of which Python would keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object has a key twice: {', '.join(key for key, _ in pairs)}")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys)


def _read_json(file: IO[bytes], name: str) -> Iterator[Row]:
    """A list of objects, or JSON Lines, which often have this extension, too."""
    # Not every compressed file can be read from the start again.
    file = io.BufferedReader(_Raw(file), 1 << 20)
    begin = file.peek(1).removeprefix(_BYTE_ORDER_MARK).lstrip()
    if begin[:1] != b"[":
        if _INDENTED.match(begin):
            raise OSError(
                "an object takes several lines, where a list of rows or JSON Lines is expected; write each row in one "
                "line (jq -c . file.json, or jq -c '.data[]' file.json if the rows are under 'data')"
            )
        yield from _read_json_lines(file, name)
        return
    content = file.read(_MAX_JSON + 1)
    if len(content) > _MAX_JSON:
        raise OSError(f"a list longer than {_MAX_JSON >> 30} GiB; save it as JSON Lines")
    text = content.decode("utf-8-sig")
    try:
        values = _JSON.decode(text)
    except RecursionError as error:
        raise OSError("its objects or lists are nested too deeply") from error
    except ValueError as error:
        raise OSError(f"not valid JSON: {error}") from error
    for number, value in enumerate(values, start=1):
        yield Row(f"{name} row {number}", value)


def _read_csv(file: IO[bytes], name: str, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader((line for _, line in _lines(_Raw(file))), strict=True, delimiter=delimiter)
    header = next(_csv_rows(reader), [])
    _require_unique_columns(header)
    for values in _csv_rows(reader):
        where = f"{name} line {reader.line_num}"
        if len(values) == len(header):
            yield Row(where, dict(zip(header, values, strict=True)))
        else:
            yield Row(where, None, f"{len(values)} fields, but the header has {len(header)}")


def _csv_rows(reader: Any) -> Iterator[list[str]]:
    """The non-empty rows of a `csv.reader`."""
    begin = reader.line_num + 1
    try:
        for values in reader:
            if values:
                yield values
            begin = reader.line_num + 1
    except csv.Error as error:
        raise OSError(
            f"the row that begins in line {begin}: {error}; double quotes inside quotes, and end lines with a line feed"
        ) from error


def _require_unique_columns(columns: list[str]) -> None:
    if len(set(columns)) < len(columns):
        raise OSError(f"the header has a column twice: {', '.join(columns)}")


def _read_tsv(file: IO[bytes], name: str) -> Iterator[Row]:
    return _read_csv(file, name, "\t")


def _read_parquet(file: IO[bytes], name: str, span: Span | None = None) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        parquet = ParquetFile(file)
        _require_unique_columns(parquet.schema_arrow.names)
        groups = range(span.begin, span.end) if span else range(parquet.num_row_groups)
        yield from parquet.iter_batches(batch_size=_ARROW_ROWS, row_groups=list(groups))

    return _read_batches(batches(), name, span.first if span else 1)


def _read_arrow(file: IO[bytes], name: str) -> Iterator[Row]:
    """A stream of Arrow batches, as `datasets` saves them, or a file of them, which begins with its own mark."""
    from pyarrow import ArrowException, ipc

    def batches() -> Iterator[Any]:
        buffered = io.BufferedReader(_Raw(file))
        if buffered.peek(6).startswith(b"ARROW1"):
            found = ipc.open_file(file)
            _require_unique_columns(found.schema.names)
            yield from (found.get_batch(index) for index in range(found.num_record_batches))
            return
        try:
            stream = ipc.open_stream(buffered)
        except ArrowException as error:
            raise OSError(f"neither a stream nor a file of Arrow batches: {error}") from error
        _require_unique_columns(stream.schema.names)
        yield from stream

    return _read_batches(batches(), name)


def _read_batches(batches: Iterator[Any], name: str, first: int = 1) -> Iterator[Row]:
    from pyarrow import ArrowException

    number = first - 1
    try:
        for batch in batches:
            # Batches of Arrow files may have any size.
            step = max(1, min(_ARROW_ROWS, batch.num_rows * _ARROW_BYTES // max(batch.nbytes, 1)))
            for start in range(0, batch.num_rows, step):
                for values, problem in _arrow_rows(batch.slice(start, step)):
                    number += 1
                    yield Row(f"{name} row {number}", values, problem)
    except ArrowException as error:
        raise OSError(str(error)) from error


def _arrow_rows(batch: Any) -> list[tuple[Any, str | None]]:
    """(values, None) of each row, or (None, problem): dates may exceed Python's range, texts may not be UTF-8."""
    try:
        return [(values, None) for values in batch.to_pylist()]
    except (ValueError, OverflowError):
        return [_arrow_row(batch, index) for index in range(batch.num_rows)]


def _arrow_row(batch: Any, index: int) -> tuple[Any, str | None]:
    values = {}
    for column in batch.schema.names:
        try:
            values[column] = batch[column][index].as_py()
        except (ValueError, OverflowError) as error:
            return None, f"column {column!r} cannot be read: {error}"
    return values, None


_READERS: dict[str, Reader] = dict(
    zip(
        ROW_SUFFIXES,
        (_read_json_lines, _read_json, _read_parquet, _read_arrow, _read_csv, _read_tsv),
        strict=True,
    )
)
