"""Sources: what is read, in which order, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import json
import os
import posixpath
import re
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, recipe_of
from tasks.runtime.data.reading import readers, sources
from tasks.runtime.data.reading.sources import Files, HubDataset, Source, open_source

PAIRS = [{"prompt": f"p{i}", "completion": f"é {i}\nNA"} for i in range(3)]


def _open(source: str | list[str], **data: Any) -> Source:
    return open_source(_recipe(source, **data))


def _recipe(source: str | list[str], **data: Any) -> DataRecipe:
    return DataRecipe.from_spec(_spec(source, **data))


def _spec(source: str | list[str], **data: Any) -> RunSpec:
    return RunSpec.model_validate({"data": {"source": source, **data}})


def _values(source: Source) -> list[Any]:
    return [row.values for row in source.rows()]


def _jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _csv(path: Path, delimiter: str = ",") -> None:
    lines = "".join(f'{row["prompt"]}{delimiter}"{row["completion"]}"\r\n' for row in PAIRS)
    path.write_bytes((f"\ufeffprompt{delimiter}completion\r\n" + lines).encode())


def _zstandard(path: Path, content: bytes) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(content)


def _arrow(path: Path, new: Any) -> None:
    table = pyarrow.Table.from_pylist(PAIRS)
    with new(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=2)


LINES = "".join(json.dumps(row) + "\n" for row in PAIRS).encode()


WRITERS = {
    "a.jsonl": lambda path: _jsonl(path, PAIRS),
    "a.json": lambda path: path.write_text(json.dumps(PAIRS, indent=1), encoding="utf-8"),
    "lines.json": lambda path: _jsonl(path, PAIRS),
    "a.csv": _csv,
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), path),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": lambda path: _zstandard(path, LINES),
    "a.json.zst": lambda path: _zstandard(path, json.dumps(PAIRS).encode()),
    "a.tsv": lambda path: _csv(path, "\t"),
    "stream.arrow": lambda path: _arrow(path, pyarrow.ipc.new_stream),
    "file.arrow": lambda path: _arrow(path, pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_every_kind_give_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    source = _open(str(tmp_path / name))
    assert _values(source) == PAIRS == _values(source)


def test_lists_globs_and_folders_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        _jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "README.md").write_text("not data")

    def order(source: str | list[str]) -> str:
        return "".join(row["text"] for row in _values(_open(source)))

    assert order(str(tmp_path / "*.jsonl")) == "abc"
    assert order(str(tmp_path)) == "abc"
    (tmp_path / "d[1]").mkdir()
    _jsonl(tmp_path / "d[1]" / "literal.jsonl", [{"text": "d"}])
    assert order(str(tmp_path / "d[1]" / "literal.jsonl")) == "d"
    (tmp_path / "d1").mkdir()
    _jsonl(tmp_path / "d1" / "other.jsonl", [{"text": "e"}])
    assert order(str(tmp_path / "d[1]" / "*.jsonl")) == order(f"file://{tmp_path}/d[1]/l*.jsonl") == "d"
    assert order(str(tmp_path / "d[12]" / "*.jsonl")) == "e" and order(str(tmp_path / "d*" / "*.jsonl")) == "ed"
    assert order(str(tmp_path / "d[1]" / "**" / "*.jsonl")) == "d"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none': the folder has no file of a known format \(.jsonl, .json"):
        _open(str(tmp_path / "none"))
    assert order([str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")]) == "cab"


HIDDEN = (
    "a.jsonl",
    "b/c.jsonl",
    ".hidden.jsonl",
    "._a.jsonl",
    ".ipynb_checkpoints/a-checkpoint.jsonl",
    "b/.cache/d.jsonl",
    "__MACOSX/._c.jsonl",
    "__pycache__/e.jsonl",
)
PATTERNS = {
    "*.jsonl": "._a.jsonl, .hidden.jsonl",
    "*/*.jsonl": ".ipynb_checkpoints/a-checkpoint.jsonl, __MACOSX/._c.jsonl, __pycache__/e.jsonl",
    "**/*.jsonl": "._a.jsonl, .hidden.jsonl, .ipynb_checkpoints/a-checkpoint.jsonl and 3 more",
    "[!b]*.jsonl": "._a.jsonl, .hidden.jsonl",
    # What a pattern names is read.
    ".h*.jsonl": "",
    "b/.c*/*.jsonl": "",
    "__p*/*.jsonl": "",
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("above", ["data", ".cache/data"])
def test_hidden_files_are_read_where_a_pattern_names_them(pattern: str, above: str, tmp_path: Path) -> None:
    from datasets.data_files import resolve_pattern

    folder = _fill(tmp_path / above, HIDDEN)
    source = _open(f"{folder}/{pattern}")
    found = [posixpath.relpath(path, folder) for _, path in source.found]
    assert found == sorted(posixpath.relpath(path, folder) for path in resolve_pattern(f"{folder}/{pattern}", ""))
    notes = [f"skips hidden files: {PATTERNS[pattern]}"] if PATTERNS[pattern] else []
    assert [note.replace(f"{folder}/", "") for note in source.notes] == notes


def test_hidden_files_alone_are_no_data(tmp_path: Path) -> None:
    folder = _fill(tmp_path, ("._a.jsonl", ".b.jsonl"))
    hidden = r"only hidden files: .*/\._a.jsonl, .*/\.b.jsonl; name them, or begin a part"
    with pytest.raises(ValueError, match=hidden):
        _open(f"{folder}/*.jsonl")
    assert [row["text"] for row in _values(_open(f"{folder}/.b.jsonl"))] == [".b.jsonl"]


SPLITS = {
    "names": ("train.jsonl", "test.jsonl", "valid.jsonl"),
    "ends of names": ("gsm8k-train.jsonl", "gsm8k.test.jsonl", "gsm8k_eval_2.jsonl"),
    "folders": ("train/a.jsonl", "test/train.jsonl"),
    "the Hub's": ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "dataset_infos.json"),
    "subsets": ("main/train-00000.jsonl", "main/test-00000.jsonl"),
    "hidden": ("train.jsonl", ".cache/train.jsonl", ".ipynb_checkpoints/more.jsonl", "._train.jsonl"),
    "none": ("trainers.jsonl", ".git/more.jsonl"),
}


def test_folders_that_datasets_saves(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, load_from_disk

    whole = Dataset.from_list(PAIRS)
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    assert _values(_open(str(tmp_path / "one"))) == PAIRS
    # A cache beside them, as `map` leaves it, is no data.
    load_from_disk(tmp_path / "one").map(lambda row: {"prompt": "x" + row["prompt"]})
    assert len(list((tmp_path / "one").glob("cache-*.arrow"))) > 0
    assert _values(_open(str(tmp_path / "one"))) == PAIRS
    DatasetDict(train=whole.select([0, 1]), test=whole.select([2])).save_to_disk(tmp_path / "splits")
    assert _values(_open(str(tmp_path / "splits"))) == PAIRS[:2]
    assert _values(_open(str(tmp_path / "splits"), split="test")) == PAIRS[2:]


def _fill(folder: Path, files: tuple[str, ...]) -> str:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _jsonl(folder / name, [{"text": name}])
    return str(folder)


@pytest.mark.parametrize("files", SPLITS.values(), ids=SPLITS)
def test_of_a_folder_the_files_of_the_split_are_read(files: tuple[str, ...], tmp_path: Path) -> None:
    source = _open(_fill(tmp_path, files))
    assert [row["text"] for row in _values(source)] == [files[0]]
    assert source.notes[0].startswith(f"reads {files[0]}")


def test_files_of_a_folder_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    source = _open(_fill(tmp_path, ("a.jsonl", "b.jsonl.lz4", "c.ods", ".d.ods", ".e/f.jsonl", "._a.jsonl")))
    assert source.notes == (
        "reads a.jsonl; not read, .lz4: b.jsonl.lz4; not read, .ods: c.ods; not read, hidden: ._a.jsonl, .e/f.jsonl",
    )


def test_a_folder_of_texts_is_read_whole_and_a_readme_beside_rows_is_not(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c/d.rst", "e.html", "f"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"text of {name}\n")
    source = _open(str(tmp_path / "texts"))
    assert [row["text"] for row in _values(source)] == ["text of a.md", "text of b.txt", "text of c/d.rst"]
    assert source.notes == ("reads a.md, b.txt, c/d.rst; not read, no extension: f; not read, .html: e.html",)
    source = _open(_fill(tmp_path / "rows", ("README.md", "a.jsonl", "notes.rst")))
    assert source.notes == ("reads a.jsonl; not read, .md: README.md; not read, .rst: notes.rst",)
    (tmp_path / "rows" / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"mixes files of different formats: .jsonl \(.*\), text \(.*b.txt\)"):
        _open(str(tmp_path / "rows"))


def test_any_split_of_a_folder_can_be_read(tmp_path: Path) -> None:
    shards = [f"data/{split}-00000-of-00001.jsonl" for split in ("test", "test_sft", "train_gen", "train_sft")]
    folder = _fill(tmp_path, (*shards, "data/dev-00000-of-00001.jsonl"))
    for split, file in zip(("test", "test_sft", "train_gen", "train_sft"), shards, strict=True):
        source = _open(f"{folder}/", split=split)
        assert [row["text"] for row in _values(source)] == [file]
    assert f", of split 'train_sft'; left out: data/dev-00000-of-00001.jsonl, {shards[0]}" in source.notes[0]
    assert _values(_open(folder, split="dev")) == _values(_open(folder, split="validation"))
    with pytest.raises(
        ValueError, match=r"data.split is 'train', but file names contain the splits 'validation' \(.*'train_gen"
    ):
        _open(folder)


def test_files_of_no_split_beside_those_of_one_are_a_question(tmp_path: Path) -> None:
    folder = _fill(tmp_path, ("test.jsonl", "rows.jsonl"))
    with pytest.raises(
        ValueError, match=r"'test' \(test.jsonl\), but the names rows.jsonl contain none; give a glob .*, such as"
    ):
        _open(folder)
    assert len(_values(_open(f"{folder}/**/*.jsonl"))) == 2


# Cards as repositories of the Hub have them, with the files beside them; and what is asked for.
CARDS = {
    "several data sets": (
        "- config_name: main\n  data_files:\n"
        "  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n"
        "- config_name: other\n  data_files:\n  - split: train\n    path: [other/train-*, more/*/b.jsonl]\n",
        ("main/train-0.jsonl", "main/test-0.jsonl", "other/train-0.jsonl", "more/x/b.jsonl", "more/b.jsonl"),
        [("main", "train"), ("main", "test"), ("other", "train")],
    ),
    "a default": (
        "- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  default: true\n  data_files: [b.jsonl, c/**]\n",
        ("a.jsonl", "b.jsonl", "c/d/e.jsonl", "f.jsonl"),
        [(None, "train"), ("a", "train"), ("b", "train")],
    ),
    "splits that no name tells": (
        "- config_name: default\n  data_files:\n"
        "  - {split: train, path: good.jsonl}\n  - {split: held, path: kept.jsonl}\n",
        ("good.jsonl", "kept.jsonl", "raw/all.jsonl"),
        [(None, "train"), (None, "held")],
    ),
    "a folder of each": (
        "- config_name: en\n  data_dir: en\n- config_name: de\n  data_dir: ./de\n  data_files: rows*.jsonl\n",
        ("en/train.jsonl", "en/test.jsonl", "de/rows-1.jsonl", "de/test.jsonl"),
        [("en", "train"), ("en", "test"), ("de", "train")],
    ),
}


@pytest.mark.parametrize(("card", "files", "asked"), CARDS.values(), ids=CARDS)
def test_of_a_folder_with_a_card_the_files_are_read_that_datasets_reads(
    card: str, files: tuple[str, ...], asked: list[tuple[str | None, str]], tmp_path: Path
) -> None:
    from datasets import load_dataset

    folder = _fill(tmp_path / "rows", files)
    (tmp_path / "rows" / "README.md").write_bytes(f"---\r\nconfigs:\n{card}license: mit\n---\n# Rows\n".encode())
    for subset, split in asked:
        expected = load_dataset(folder, subset, split=split, cache_dir=str(tmp_path / "cache"))
        source = _open(folder, subset=subset, split=split)
        found = [row["text"] for row in _values(source)]
        assert sorted(found) == sorted(expected["text"]) and 0 < len(found) < len(files)
        assert "of configuration" in source.notes[0]


@pytest.mark.parametrize(
    ("configs", "fields", "told"),
    [
        ("[{config_name: a}, {config_name: b}]", {}, "several data sets: .* configurations 'a', 'b'; set data.subset"),
        ("[{config_name: a}, {config_name: b}]", {"subset": "c"}, "data.subset is 'c', but .* configurations 'a', 'b'"),
        ("[{config_name: a, data_files: a.jsonl}]", {"split": "test"}, "the splits 'train' of the configuration 'a'"),
        ("[{config_name: a, data_files: b-*}]", {}, "names files 'b-\\*' .*and there are none"),
        ("[{data_files: a.jsonl}]", {}, "README.md cannot be read: 'config_name'"),
        ("{config_name: a}", {}, "README.md cannot be read: they are not a list"),
        ("[{config_name: a", {}, "README.md cannot be read: .*correct them, or name the files"),
    ],
)
def test_a_card_that_leaves_it_open_is_a_question(
    configs: str, fields: dict[str, str], told: str, tmp_path: Path
) -> None:
    folder = _fill(tmp_path, ("a.jsonl",))
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(ValueError, match=told):
        _open(folder, **fields)


def test_a_card_without_configurations_changes_nothing(tmp_path: Path) -> None:
    folder = _fill(tmp_path, ("a.jsonl", "b.jsonl"))
    for card in ("# Rows", "---\nlicense: mit\n---\n", "---\nconfigs: []\n---\n", "---\n: :\n---\n"):
        (tmp_path / "README.md").write_text(card)
        assert len(_values(_open(folder))) == 2


def test_a_configuration_of_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    folder = _fill(tmp_path, ("main/train.jsonl", "socratic/train.jsonl"))
    with pytest.raises(ValueError, match=r"data\.subset is 'main', but the folder has no README\.md that lists"):
        _open(folder, subset="main")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_urls(scheme: str, tmp_path: Path) -> None:
    base = f"{scheme}://{tmp_path}"
    with fsspec.open(f"{base}/rows.jsonl", "w") as file:
        file.write('{"text": "a"}\n')
    assert _values(_open(f"{base}/rows.jsonl")) == _values(_open(f"{base}/*.jsonl")) == [{"text": "a"}]
    before = _open(f"{base}/rows.jsonl").digest()
    with fsspec.open(f"{base}/rows.jsonl", "w") as file:
        file.write('{"text": "longer"}\n')
    assert _open(f"{base}/rows.jsonl").digest() != before


def test_a_row_names_its_line_and_its_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": \n[1]\n')
    rows = list(_open(str(tmp_path / "a.jsonl")).rows())
    assert [row.where for row in rows] == [f"{tmp_path}/a.jsonl line {n}" for n in (1, 3, 4)]
    with pytest.raises(ValueError, match=r"a.jsonl line 3: not valid JSON: Expecting value"):
        rows[1].fields()
    with pytest.raises(ValueError, match=r"a.jsonl line 4: an object with columns was expected, not list \[1\]"):
        rows[2].fields()


@pytest.mark.parametrize(
    ("line", "problem"),
    [("[" * 100_000, "its objects or lists are nested too deeply"), ("1" * 5000, "not valid JSON: Exceeds the limit")],
    ids=["deep", "digits"],
)
def test_a_line_that_is_too_much_for_the_parser_is_a_faulty_row(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{line}\n{{"text": "a"}}\n')
    bad, good = _open(str(tmp_path / "a.jsonl")).rows()
    assert good.problem is None and bad.problem is not None and bad.problem.startswith(problem)


def test_a_csv_row_with_a_field_too_many_is_a_faulty_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\na,b,c\n")
    good, bad = _open(str(tmp_path / "a.csv")).rows()
    assert good.problem is None
    assert (bad.where, bad.problem) == (f"{tmp_path}/a.csv line 3", "3 fields, but the header has 2")


def test_long_csv_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(_values(_open(str(tmp_path / "a.csv")))[0]["text"]) == 200_000


def test_a_parquet_value_that_python_cannot_say_is_a_faulty_row(tmp_path: Path) -> None:
    days = pyarrow.array([1, 10**7], pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "day": days}), tmp_path / "a.parquet")
    good, bad = _open(str(tmp_path / "a.parquet")).rows()
    assert good.problem is None and good.values["text"] == "a"
    assert (bad.where, bad.problem) == (
        f"{tmp_path}/a.parquet row 2",
        "column 'day' cannot be read: date value out of range",
    )


def test_a_key_that_is_there_twice_is_a_faulty_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "text": "b"}\n{"text": "c", "more": [{"text": "d"}]}\n')
    bad, good = _open(str(tmp_path / "a.jsonl")).rows()
    assert good.values == {"text": "c", "more": [{"text": "d"}]}
    assert bad.problem == "not valid JSON: an object has a key twice: text, text"


def test_csv_begins_with_the_first_line_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n\ntext\n\na\n")
    assert [(row.where, row.values) for row in _open(str(tmp_path / "a.csv")).rows()] == [
        (f"{tmp_path}/a.csv line 5", {"text": "a"})
    ]


def _twice() -> bytes:
    file = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text"] * 2), file)
    return file.getvalue()


BROKEN = {
    "a.parquet": (b"no parquet", "Parquet magic bytes"),
    "a.jsonl": (b'{"text": "\xe9"}\n', r"line 1 is not UTF-8 \(invalid continuation byte at byte 10\); save"),
    "utf-16.csv": ("text\na\n".encode("utf-16"), "line 1 is not UTF-8 .*; save it as UTF-8"),
    "a.json": (b"[1, 2", "not valid JSON: Expecting ',' delimiter"),
    "object.json": (b'{\r\n "data": [{"text": "a"}]\n}\n', r"an object takes several lines, .* jq -c"),
    "digits.json": (b"[" + b"1" * 5000 + b"]", "not valid JSON: Exceeds the limit"),
    "twice.json": (b'[{"text": 1, "text": 2}]', "not valid JSON: an object has a key twice: text, text"),
    "deep.json": (b"[" * 100_000 + b"]" * 100_000, "its objects or lists are nested too deeply"),
    "a.jsonl.gz": (b"no gzip", "Not a gzipped file"),
    "a.jsonl.zst": (b"no zstandard", "ZSTD decompress failed"),
    "a.arrow": (b"no arrow", "neither a stream nor a file of Arrow"),
    "a.csv": (
        b'text\na\n"open\nb\n',
        "the row that begins in line 3: unexpected end of data; double quotes inside quotes",
    ),
    "quote.csv": (b'text\n"a\nb"\n"c"d\n', "the row that begins in line 4: ',' expected after '\"'; double quotes"),
    "twice.csv": (b"text,text\n", "has a column twice: text, text"),
    "twice.parquet": (_twice(), "has a column twice: text, text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unreadable_file_is_named(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"data.source: cannot read {tmp_path / name}: .*{reason}"):
        list(_open(str(tmp_path / name)).rows())


def test_what_is_not_found_says_what_was_looked_for(tmp_path: Path) -> None:
    _jsonl(tmp_path / "train.jsonl", [])
    looked = "looked for the built-in python-docs"
    trian = tmp_path / "trian.jsonl"
    with pytest.raises(ValueError, match=f"'{trian}' was not found; {looked}, the file or folder {trian}; "
                       "did you mean 'train.jsonl'"):  # fmt: skip
        _open(str(trian))
    with pytest.raises(ValueError, match=r"'memory://none/at.jsonl' was not found; looked for that URL$"):
        _open("memory://none/at.jsonl")
    with pytest.raises(ValueError, match=rf"'python-doc' was not found; {looked}, the file or folder .*/python-doc, "
                       r"the Hub \(.*reach.*\); did you mean 'python-docs'"):  # fmt: skip
        list(_open("python-doc").rows())
    with pytest.raises(ValueError, match=rf"'python-docs' was not found; {looked} \(not in a list\)"):
        _open(["python-docs", str(tmp_path / "train.jsonl")])


@pytest.mark.parametrize("source", ["memory://bucket/a.jsonl", "memory://bucket/*.jsonl", "memory://bucket"])
def test_a_store_that_does_not_let_in_is_told(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        """As of a store's client, whose errors are no OSErrors."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise NoCredentials("Unable to locate credentials")

    for ask in ("exists", "glob", "isdir"):
        monkeypatch.setattr(f"fsspec.implementations.memory.MemoryFileSystem.{ask}", refuse)
    with pytest.raises(ValueError, match=rf"data.source '{re.escape(source)}' cannot be read: NoCredentials: Unable to "
                       r"locate credentials; check the credentials and"):  # fmt: skip
        _open(source)


def test_kinds_are_not_mixed_and_must_be_known(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.bin"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"mixes files of different formats: .jsonl \(.*a.jsonl\), text \(.*b.txt\)"):
        _open([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    with pytest.raises(ValueError, match=r"cannot tell the format of .*c.bin; known are .jsonl, .json, .parquet"):
        _open(str(tmp_path / "c.bin"))
    with pytest.raises(ValueError, match=r"'nosuch://a.jsonl': Protocol not known"):
        _open("nosuch://a.jsonl")


@pytest.mark.parametrize(("field", "value"), [("documents", "line"), ("document_separator", "---")])
def test_what_only_text_files_have_is_not_skipped_silently(field: str, value: str, tmp_path: Path) -> None:
    for source in (_jsonl(tmp_path / "a.jsonl", PAIRS), "python-docs", "someone/greetings"):
        with pytest.warns(UserWarning, match=f"data.{field} '{value}' has no effect: .* has no text files"):
            _open(source, **{field: value})


@pytest.mark.parametrize("field", ["subset", "split", "revision"])
def test_what_only_the_hub_has_is_not_skipped_silently(field: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"data.{field} 'x' has no effect: data.source .* is not on the Hub"):
        _open(_jsonl(tmp_path / "a.jsonl", PAIRS), **{field: "x"})


def test_a_web_address_with_a_query(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", PAIRS)
    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        source = _open(f"{base}/a.jsonl?download=true")
        assert _values(source) == PAIRS
        before = source.digest()
        _jsonl(tmp_path / "a.jsonl", PAIRS[:2])
        assert _open(f"{base}/a.jsonl?download=true").digest() != before
        WRITERS["a.jsonl.gz"](tmp_path / "a.jsonl.gz")
        assert _values(_open(f"{base}/a.jsonl.gz?from=a/b")) == PAIRS
        # As long as it was, and later: such a server tells no tag.
        before = _open(f"{base}/a.jsonl").digest()
        os.utime(tmp_path / "a.jsonl", (0, 0))
        assert _open(f"{base}/a.jsonl").digest() != before
        with pytest.raises(ValueError, match="was not found; looked for that URL"):
            _open(f"{base}/none.jsonl")
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize("field", ["blob_id", "sha", "modified", "Content-MD5"])
def test_what_a_store_tells_of_a_version_is_known(field: str) -> None:
    """As `hf://`, `github://`, `webdav://` and web servers have it; the file is as long as before."""
    digests = [
        Files("a", ((SimpleNamespace(info=lambda path, at=at: {"size": 5, field: at}), "a.jsonl"),)).digest()
        for at in ("first", "second")
    ]
    assert digests[0] != digests[1]


def test_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    path, template = tmp_path / "a.jsonl", tmp_path / "t.jinja"
    _jsonl(path, PAIRS)
    template.write_text("{{ messages }}")
    spec = _spec(str(path), chat_template=str(template))
    seen = [fingerprint(spec), fingerprint(spec)]
    _jsonl(path, PAIRS[:2])
    seen.append(fingerprint(spec))
    template.write_text("{{ messages }} ")
    seen.append(fingerprint(spec))
    assert seen[0] == seen[1] and len(set(seen)) == 3
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    spec = RunSpec.model_validate({"data": {"source": str(path)}, "model": {"tokenizer": str(folder)}})
    for name in ("tokenizer.json", "tekken.json"):
        before = fingerprint(spec)
        (folder / name).write_text("{}")
        assert fingerprint(spec) != before


def test_fingerprint_follows_the_settings_of_the_models_processor(tmp_path: Path) -> None:
    """Also beside a tokenizer from another folder."""
    _jsonl(tmp_path / "a.jsonl", PAIRS)
    for name in ("tokenizer", "model"):
        (tmp_path / name).mkdir()
    model = {"name": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer")}
    spec = RunSpec.model_validate({"data": {"source": str(tmp_path / "a.jsonl")}, "model": model})
    seen = [fingerprint(spec)]
    for settings in ('{"size": 224}', '{"size": 448}'):
        (tmp_path / "model" / "preprocessor_config.json").write_text(settings)
        seen.append(fingerprint(spec))
    assert len(set(seen)) == 3


# What sounds and pictures are: nobody listens to them.
RAW = {"bytes": b"-", "path": None}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of the Hub as an earlier download left it."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "someone___greetings" / "default" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    texts = {name: datasets.Value("string") for name in PAIRS[0]}
    features = datasets.Features({**texts, "spoken": datasets.Audio(), "drawn": datasets.Image()})
    with ArrowWriter(path=str(folder / "greetings-train.arrow"), features=features) as writer:
        for row in PAIRS:
            writer.write({**row, "spoken": RAW, "drawn": RAW})
        count, size = writer.finalize()
    split = {"name": "train", "num_bytes": size, "num_examples": count, "dataset_name": "greetings"}
    info = datasets.DatasetInfo(
        features=features,
        builder_name="json",
        dataset_name="greetings",
        config_name="default",
        version="0.0.0",
        splits={"train": split},
    )
    info.write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


@pytest.mark.usefixtures("hub_cache")
def test_hub_data_sets() -> None:
    rows = [{**row, "spoken": RAW, "drawn": RAW} for row in PAIRS]
    assert _values(_open("someone/greetings")) == rows
    with pytest.raises(ValueError, match=r"'someone/greetings' with data.subset None, data.split 'tset': Bad split"):
        _values(_open("someone/greetings", split="tset"))
    with pytest.raises(ValueError, match=r"(?s)data.subset 'x'.*Available configs in the cache: \['default'\]"):
        _values(_open("someone/greetings", subset="x"))
    with pytest.raises(ValueError, match=r"'someone/none' was not found; .* the Hub \(Couldn't reach"):
        _values(_open("someone/none"))


def test_a_repository_is_streamed_by_its_splits_and_configurations(tmp_path: Path) -> None:
    """By `datasets` itself, from a repository with the Hub's layout that lies on disk."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: short\n  data_files:\n  - {split: train, path: a/*.parquet}\n"
        "  - {split: test, path: b.parquet}\n---\n"
    )
    (tmp_path / "a").mkdir()
    for number in range(3):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS[number:][:1]), tmp_path / "a" / f"{number}.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS[:2]), tmp_path / "b.parquet")
    assert _values(HubDataset(str(tmp_path), "short", "train", None)) == PAIRS
    assert _values(HubDataset(str(tmp_path), "short", "test", None)) == PAIRS[:2]
    # The rows of the first file are there before the last one is read, which is broken.
    (tmp_path / "a" / "2.parquet").write_bytes(b"no parquet")
    rows = HubDataset(str(tmp_path), "short", "train", None).rows()
    assert [next(rows).values, next(rows).values] == PAIRS[:2]


def test_a_data_set_that_is_streamed_may_not_know_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    found = datasets.IterableDataset.from_generator(lambda: iter(PAIRS))
    assert found.features is None
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: found)
    assert _values(_open("someone/greetings", max_samples=2)) == PAIRS


def test_a_data_set_that_code_makes_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str, **options: Any) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found greetings.py")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(ValueError, match=r"data.source 'someone/greetings': .*scripts are no longer supported.*; set "
                       "data.revision to 'refs/convert/parquet'"):  # fmt: skip
        _values(_open("someone/greetings"))


def test_a_data_set_of_the_hub_is_read_at_the_commit_that_was_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import HfApi

    newest, earlier = "a" * 40, "b" * 40
    asked: list[str | None] = []
    loaded: list[str] = []

    def info(hub: HfApi, name: str, revision: str | None, timeout: float) -> SimpleNamespace:
        asked.append(revision)
        return SimpleNamespace(sha=newest)

    monkeypatch.setattr(HfApi, "dataset_info", info)
    found = datasets.Dataset.from_list(PAIRS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, revision, **rest: loaded.append(revision) or found)
    unpinned, branch = _spec("someone/greetings"), _spec("someone/greetings", revision="main")
    recipes = [recipe_of(unpinned), recipe_of(branch)]
    assert asked == [None, "main"]
    # From here on nobody asks.
    recipes.append(recipe_of(_spec("someone/greetings", revision=newest)))
    assert [recipe.data.revision for recipe in recipes] == [newest] * 3
    assert len({recipe.hash() for recipe in recipes}) == 1
    again = recipe_of(unpinned, [earlier])
    assert again == recipe_of(_spec("someone/greetings", revision=earlier)) and again.hash() != recipes[0].hash()
    for recipe in (recipes[0], again):
        assert _values(open_source(recipe)) == PAIRS
    assert loaded == [newest, earlier] and len(asked) == 2


def test_a_hub_that_is_away_is_warned_of_whatever_its_client_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoConnection(Exception):
        """As of the client's HTTP library, whose errors are no OSErrors."""

    def info(*arguments: Any, **options: Any) -> None:
        raise NoConnection

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    with pytest.warns(UserWarning, match=r"the Hub did not return the commit of 'someone/greetings' \(NoConnection\)"):
        assert recipe_of(_spec("someone/greetings")).data.revision is None


def test_a_commit_is_not_waited_for_where_a_hub_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(sources, "COMMIT_TIMEOUT", 0.05)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The kernel accepts the connection, and nobody reads from it.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.HfApi", partial(HfApi, endpoint=endpoint))
        with pytest.warns(UserWarning, match=r"the Hub did not return the commit of 'someone/greetings' \(ReadTimeout"):
            assert _open("someone/greetings").commit() is None


def test_only_data_of_the_hub_has_a_commit(tmp_path: Path) -> None:
    spec = _spec(_jsonl(tmp_path / "a.jsonl", PAIRS))
    assert recipe_of(spec, ["a" * 40]) == recipe_of(spec) == DataRecipe.from_spec(spec, fingerprint(spec))
    with pytest.warns(UserWarning, match="the Hub did not return the commit of 'someone/greetings'"):
        assert recipe_of(_spec("someone/greetings")).data.revision is None


def test_fingerprint_of_the_hub_is_its_commit() -> None:
    commits = ["0" * 40, "1" * 40]
    digests = {_open("someone/greetings", revision=commit).digest() for commit in commits}
    assert len(digests) == 2
    with pytest.warns(UserWarning, match="the Hub did not return the commit of 'someone/greetings'"):
        _open("someone/greetings").digest()


@pytest.mark.parametrize(
    ("name", "message"), [("a.jsonl.gz", "line 2 is longer than 1 MiB"), ("a.json.gz", "a list lon")]
)
def test_a_small_compressed_file_of_any_length_is_not_read_whole(tmp_path, monkeypatch, name, message):
    monkeypatch.setattr(readers, "_MAX_LINE", 1 << 20)
    monkeypatch.setattr(readers, "_MAX_JSON", 1 << 20)
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(b"[]\n" if name == "a.jsonl.gz" else b"[")
        for _ in range(20):
            file.write(b" " * (1 << 19))
    assert (tmp_path / name).stat().st_size < 20_000
    recipe = DataRecipe.from_spec(RunSpec(data={"source": str(tmp_path / name)}))
    with pytest.raises(ValueError, match=rf"data\.source: cannot read .*{name}: {message}"):
        list(open_source(recipe).rows())
