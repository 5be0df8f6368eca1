"""Parts of a source: together they have its rows, once each and with their numbers, however it is divided."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tasks.runtime.data.preparation.parts import Part, divide
from tasks.runtime.data.reading.sources import Files
from tasks.runtime.data.reading.text_files import WHOLE_FILES, TextDocuments

LINES = [json.dumps({"text": f"text {number} " + "é" * (number * 7 % 90)}) for number in range(200)]


def files(*paths: Path, texts: TextDocuments = WHOLE_FILES) -> Files:
    return Files.find(tuple(map(str, paths)), "train", texts)


def rows(source: Files, parts: list[Part]) -> list[tuple[str, object]]:
    return [(row.where, row.values) for part in sorted(parts) for row in part.rows(source)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"], ids=["unix", "windows", "blank-lines"])
@pytest.mark.parametrize("part_bytes", [1, 97, 1000, 4000])
def test_spans_of_a_file_of_lines_have_its_rows(tmp_path: Path, part_bytes: int, end: str) -> None:
    # The last line has no end.
    (tmp_path / "rows.jsonl").write_bytes(end.join(["\ufeff" + LINES[0], *LINES[1:]]).encode())
    source = files(tmp_path / "rows.jsonl")
    parts = divide(source, max_samples=None, seed=3, part_bytes=part_bytes)
    assert len(parts) > 2
    assert rows(source, parts) == [(row.where, row.values) for row in source.rows()]
    assert sorted(parts) != parts
    assert sorted(parts) == sorted(divide(source, max_samples=None, seed=4, part_bytes=part_bytes))


def test_spans_of_a_text_of_lines_have_its_lines(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    source = files(tmp_path / "lines.txt", texts=TextDocuments("line"))
    parts = divide(source, max_samples=None, seed=0, part_bytes=500)
    assert len(parts) > 5
    assert rows(source, parts) == [(row.where, row.values) for row in source.rows()]


def test_row_groups_of_a_parquet_file_have_its_rows(tmp_path: Path) -> None:
    table = pa.table({"text": LINES, "number": range(200)})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=30)
    source = files(tmp_path / "rows.parquet")
    parts = divide(source, max_samples=None, seed=0, part_bytes=1500)
    assert 2 < len(parts) <= 7
    assert rows(source, parts) == [(row.where, row.values) for row in source.rows()]


@pytest.mark.parametrize(("name", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_small_files_are_taken_together_and_compressed_ones_whole(tmp_path: Path, name: str, codec: str) -> None:
    for number in range(12):
        (tmp_path / f"{number:02d}.jsonl").write_text(LINES[number] + "\n")
    with pa.CompressedOutputStream(str(tmp_path / f"90.jsonl.{name}"), codec) as file:
        file.write("\n".join(LINES).encode())
    source = files(*sorted(tmp_path.iterdir()))
    parts = divide(source, max_samples=None, seed=0, part_bytes=300)
    assert [len(part.pieces) for part in sorted(parts)][-1] == 1 < len(sorted(parts)[0].pieces) < 12
    assert rows(source, parts) == [(row.where, row.values) for row in source.rows()]


def test_what_cannot_be_divided_is_one_part(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES))
    (tmp_path / "one.txt").write_text("\n".join(LINES))
    whole = [Part(0, None)]
    assert divide(files(tmp_path / "one.txt"), max_samples=None, seed=0, part_bytes=100) == whole
    assert divide(files(tmp_path / "rows.jsonl"), max_samples=5, seed=0, part_bytes=100) == whole
    assert divide(files(tmp_path / "rows.jsonl"), max_samples=None, seed=0, part_bytes=1 << 20) == whole
    assert len(list(whole[0].rows(files(tmp_path / "rows.jsonl")))) == 200
