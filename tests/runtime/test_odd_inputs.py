"""Files that nobody meant to give: each is read right, or refused in words, without a traceback, a hang or silence.

`test_user_mistakes` has what people get wrong. Here is what files, editors, tools and disks get wrong.
"""

import gzip
import io
import json
import os
import signal
import socket
import sys
import warnings

import pytest
from typer.testing import CliRunner

from strata_platform.cli import app
from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime.data import prepare, recipe_of, shard_store
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.process.errors import Unreachable

SECONDS = 60
ROW = {"prompt": "2 + 2 = ", "completion": "4"}
TALK = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
LINE = json.dumps(ROW) + "\n"


@pytest.fixture(autouse=True)
def limited():
    """A hang is a failure."""

    def stop(*_):
        raise AssertionError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def loop(path):
    path.symlink_to(path)


def endless(path):
    path.symlink_to("/dev/zero")


def compressed(content):
    held = io.BytesIO()
    with gzip.GzipFile(fileobj=held, mode="wb", mtime=0) as file:
        file.write(content)
    return held.getvalue()


def put(path, content):
    """Write text, bytes or values to `path`; a function makes what it likes there."""
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))])

# What the spec's file holds; and what `strata spec` says, or None if it accepts it.
SPECS = {
    "mark": (b"\xef\xbb\xbfseed: 1\n", None),
    "crlf": (b"seed: 1\r\nname: a\r\n", None),
    "no-line-break": ("seed: 1", None),
    "utf-16": ("seed: 1\n".encode("utf-16"), "not UTF-8: byte 0 is 0xff; save it as UTF-8"),
    "latin-1": ("name: é\n".encode("latin-1"), "not UTF-8: byte 6 is 0xe9; save it as UTF-8"),
    "empty": ("", "empty; {} is the spec with all its defaults"),
    "blank": (" \n\n", "empty; {} is the spec with all its defaults"),
    "null-byte": (b"seed: 1\x00\n", "line 1: not valid YAML: special characters are not allowed"),
    "binary": (bytes(range(256)), "not UTF-8: byte 128 is 0x80"),
    "gzip": (compressed(b"seed: 1"), "not UTF-8: byte 1 is 0x8b"),
    "lists": ("[" * 100_000, "nested too deeply"),
    "mappings": ("{a: " * 100_000, "nested too deeply"),
    "aliases": (ALIASES, "a39 (line 40): no such field"),
    "merges": (MERGES, "a39 (line 40): no such field"),
    "itself": ("data: &d\n  source: *d\n", "data.source (line 2)"),
    "two-documents": ("seed: 1\n---\nseed: 2\n", "line 2: not valid YAML, column 1: but found another document"),
    "object": ("seed: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "twice": ('{"seed": 1, "seed": 2}', "seed (line 1): given twice, first in line 1; keep one"),
    "nan": ("optimizer: {lr: .nan}", "optimizer.lr (line 1): not a valid value; given: NaN"),
    "infinity": ("optimizer: {max_grad_norm: .inf}", "optimizer.max_grad_norm (line 1): not a valid value; given: Inf"),
    "overflow": ("optimizer: {lr: 1e999}", "optimizer.lr (line 1): not a valid value; given: Infinity"),
    "whole-overflow": ("training: {steps: 1e999}", "training.steps (line 1): not a valid value; given: Infinity"),
    "large": ("training: {steps: 1000000000000000000}", "allowed: a whole number from 1 to 1000000000"),
    "large-number": ("training: {epochs: 1" + "0" * 400 + "}", "training.epochs (line 1): not a valid value"),
    "digits": ("seed: 1" + "0" * 5000, "not valid YAML: Exceeds the limit (4300 digits)"),
    "other-digits": ("seed: \uff11\uff12", "seed (line 1): not a number; given: '\uff11\uff12'"),
    "time": ("training: {steps: 1:30}", "not a number: YAML 1.1 reads it as 90, YAML 1.2 as text; write 90"),
    "date": ("seed: 2024-13-45", "seed (line 1): not a number; given: '2024-13-45'"),
    "surrogate": (r'output: "a\ud800"', "line 1: 'a\\ud800' has half a surrogate pair, which is not a character"),
    "surrogate-name": (r'"\ud800": 1', "line 1: '\\ud800' has half a surrogate pair"),
    "null-character": (r'output: "a\0b"', "output (line 1): has a null character"),
    "line-break": (r'output: "a\nb"', "output (line 1): has a line break in it"),
    "null-in-source": (r'data: {source: "a\0.jsonl"}', "data.source (line 1): has a null character"),
    "output-is-a-file": ("output: my.yaml/out", "output (line 1): my.yaml is a file, not a folder"),
    "long-name": (f"data: {{source: {'x' * 5000}.jsonl}}", "data.source (line 1): cannot be read: File name too long"),
    "template-missing": ("data: {chat_template: a.jinja}", "data.chat_template (line 1): there is no such file"),
    "pipe": (pipe, "a named pipe, not a regular file"),
    "folder": (folder, "cannot be read: Is a directory"),
    "loop": (loop, "cannot be read: Too many levels of symbolic links"),
    "endless": (endless, "a device, not a regular file"),
    "long": (b"#" * (5 << 20), "longer than 4 MiB, so it is not a spec; give another file"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), SPECS.values(), ids=SPECS)
def test_a_spec(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "my.yaml", content)
    result = CliRunner().invoke(app, ["spec", "my.yaml"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == (0 if message is None else 2), result.output
    if message is not None:
        assert "my.yaml has " in result.stderr and message in result.stderr, result.stderr


NO_JSON = r"rows.jsonl line 2: not valid JSON: "

# The name of the data file, what it holds, and what preparing it says; or the number of samples that it reads.
DATA = {
    "mark": ("rows.jsonl", b"\xef\xbb\xbf" + LINE.encode() * 2, 2),
    "crlf": ("rows.jsonl", LINE.replace("\n", "\r\n") * 2, 2),
    "blank-lines": ("rows.jsonl", f"\n\n{LINE}  \n{LINE}\n", 2),
    "no-last-line-break": ("rows.jsonl", LINE + LINE.strip(), 2),
    "line-separator": ("rows.jsonl", json.dumps({**ROW, "prompt": "a\u2028b"}, ensure_ascii=False) + "\n" + LINE, 2),
    "utf-16": ("rows.jsonl", LINE.encode("utf-16"), "rows.jsonl: line 1 is not UTF-8"),
    "latin-1": ("rows.jsonl", LINE.replace("4", "é").encode("latin-1"), "rows.jsonl: line 1 is not UTF-8"),
    "empty": ("rows.jsonl", "", "rows.jsonl' has no rows"),
    "blank": ("rows.jsonl", "\n \n", "rows.jsonl' has no rows"),
    "null-bytes": ("rows.jsonl", LINE.encode() + b"\0" * 100, NO_JSON),
    "cut-off": ("rows.jsonl", LINE + LINE[:20], NO_JSON),
    "deep": ("rows.jsonl", LINE + "[" * 100_000, "rows.jsonl line 2: its objects or lists are nested too deeply"),
    "deep-value": ("rows.jsonl", LINE + '{"prompt": ' + "[" * 500 + "]" * 500 + ', "completion": ""}', "line 2: col"),
    "nan": ("rows.jsonl", LINE + '{"prompt": NaN, "completion": "4"}', "line 2: column 'prompt' holds float nan"),
    "infinity": ("rows.jsonl", LINE + '{"prompt": -Infinity, "completion": "4"}', "holds float -inf, not text"),
    "digits": ("rows.jsonl", LINE + '{"prompt": 1' + "0" * 5000 + "}", NO_JSON),
    "twice": ("rows.jsonl", LINE + '{"prompt": "a", "prompt": "b", "completion": "c"}', "an object has a key twice"),
    "surrogate": ("rows.jsonl", LINE + r'{"prompt": "\ud800", "completion": "4"}', "line 2: column 'prompt' has an"),
    "surrogate-column": ("rows.jsonl", r'{"\ud800": "a"}', "recognizes none of the columns"),
    "list": ("rows.jsonl", "[]\n[]\n", "none of the first 2 rows can be read"),
    "null": ("rows.jsonl", LINE + "null\n", "rows.jsonl line 2: an object with columns was expected, not null"),
    "no-columns": ("rows.jsonl", "{}\n", "rows.jsonl line 1: it has no columns"),
    "gzip": ("rows.jsonl.gz", compressed(LINE.encode() * 2), 2),
    "gzip-cut-off": ("rows.jsonl.gz", compressed(os.urandom(0) + LINE.encode() * 500)[:-20], "rows.jsonl.gz: "),
    "gzip-of-none": ("rows.jsonl.gz", LINE, "rows.jsonl.gz: Not a gzipped file"),
    "gzip-empty": ("rows.jsonl.gz", b"", "rows.jsonl.gz' has no rows"),
    "gzip-by-another-name": ("rows.jsonl", compressed(LINE.encode()), "rows.jsonl: line 1 is not UTF-8"),
    "parquet-of-none": ("rows.parquet", LINE, "rows.parquet: "),
    "parquet-empty": ("rows.parquet", b"", "rows.parquet: "),
    "csv": ("rows.csv", b"\xef\xbb\xbfprompt,completion\r\na,b\r\nc,d\r\n", 2),
    "csv-null": ("rows.csv", b"prompt,completion\na,b\0\nc,d\n", 2),
    "csv-quote": ("rows.csv", 'prompt,completion\n"a,b\n', "rows.csv: the row that begins in line 2"),
    "csv-twice": ("rows.csv", "prompt,prompt\na,b\n", "rows.csv: the header has a column twice"),
    "json": ("rows.json", json.dumps([ROW, ROW]), 2),
    "json-object": ("rows.json", json.dumps({"rows": [ROW]}, indent=1), "rows.json"),
    "json-cut-off": ("rows.json", json.dumps([ROW, ROW])[:-5], "rows.json: not valid JSON"),
    "json-deep": ("rows.json", "[" * 100_000, "rows.json: its objects or lists are nested too deeply"),
    "folder": ("rows.jsonl", folder, "rows.jsonl"),
    "pipe": ("rows.jsonl", pipe, "rows.jsonl: a named pipe, not a regular file"),
    "loop": ("rows.jsonl", loop, "rows.jsonl' was not found"),
    "endless": ("rows.jsonl", endless, "rows.jsonl: a device, not a regular file"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["2 + 2 = 4"]), made)
    return made


def prepared(tmp_path, source, tokenizer, **data):
    values = {"source": str(source), "sequence_length": 64, "validation_fraction": 0.0, **data}
    spec = RunSpec.model_validate({"data": values, "model": {"tokenizer": str(tokenizer)}})
    return prepare(recipe_of(spec), tmp_path / "out", report=lambda line: None).manifest


@pytest.mark.parametrize(("name", "content", "expected"), DATA.values(), ids=DATA)
def test_data(tmp_path, tokenizer, name, content, expected):
    put(tmp_path / name, content)
    if isinstance(expected, int):
        assert prepared(tmp_path, tmp_path / name, tokenizer).samples_used == expected
        return
    with pytest.raises(ValueError) as caught:
        prepared(tmp_path, tmp_path / name, tokenizer)
    # What a person reads can be printed.
    assert expected in str(caught.value).encode().decode(), caught.value
    assert "data." in str(caught.value)


def test_a_folder_that_contains_itself(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "rows.jsonl").write_text(LINE)
    assert prepared(tmp_path, tmp_path / "data", tokenizer).samples_used == 1


def text(content):
    return lambda file: put(file, content)


def without(file):
    file.unlink()


def changed(**values):
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# The file of the tokenizer's folder, what happens to it, and what is said.
TOKENIZERS = {
    "missing": ("tokenizer.json", without, "cannot load its tokenizer"),
    "empty": ("tokenizer.json", text(""), "cannot load its tokenizer"),
    "cut-off": ("tokenizer.json", text('{"version": "1.0", "mod'), "cannot load its tokenizer"),
    "list": ("tokenizer_config.json", text("[]"), "cannot load its tokenizer"),
    "pipe": ("tokenizer.json", lambda file: (file.unlink(), pipe(file)), "a named pipe, not a regular file"),
    "no-end": ("tokenizer_config.json", changed(eos_token=None), "has no end-of-sequence token"),
    "syntax": ("chat_template.jinja", text("{% if %}"), "the tokenizer's own template is not a Jinja template: line 1"),
    "error": ("chat_template.jinja", text("{{ raise_exception('no') }}"), "the chat template rejects these messages"),
    "nothing": ("chat_template.jinja", text("\n"), "the chat template omits message 1"),
    "no-template": ("chat_template.jinja", without, "the tokenizer has no chat template; set data.chat_template to"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "happens", "message"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer(tmp_path, name, happens, message):
    made = tmp_path / "tokenizer"
    save_tokenizer(train_tokenizer(["2 + 2 = 4"]), made)
    happens(made / name)
    (tmp_path / "rows.jsonl").write_text(json.dumps(TALK) + "\n")
    with pytest.raises(ValueError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared(tmp_path, tmp_path / "rows.jsonl", made)
    assert message in str(caught.value), caught.value


PAIR = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
FILES = {"a.jsonl": LINE * 2, "b.jsonl": json.dumps(TALK) + "\n", "empty.jsonl": "", "pairs.jsonl": PAIR}
BOTH = {"sources": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]}
TEXT = {"objective": {"type": "pretrain"}}

# The section `data`, other sections, and what is said.
SECTIONS = {
    "twice": ({"source": ["a.jsonl", "a.jsonl"]}, {}, "a.jsonl twice; name it once"),
    "twice-by-glob": ({"source": ["a*.jsonl", "./a.jsonl"]}, {}, "a.jsonl twice; name it once"),
    "mixture-twice": (
        {"sources": [{"source": "a.jsonl"}, {"source": "./a.jsonl"}]}, {}, "'./a.jsonl' has the rows of 'a.jsonl'"
    ),
    "mixture-empty": ({"sources": [{"source": "a.jsonl"}, {"source": "empty.jsonl"}]}, {}, "'empty.jsonl' has no rows"),
    "mixture-of-objectives": (
        {"sources": [{"source": "pairs.jsonl"}, {"source": "a.jsonl"}]}, {"objective": {"type": "dpo"}},
        "'a.jsonl' of data.sources: the objective needs pairs of answers",
    ),
    "mixture-null": ({"sources": None}, {}, "data.sources: not a valid value; given: null"),
    "mixture-of-names": ({"sources": ["a.jsonl"]}, {}, "data.sources[0]: not a section; given: 'a.jsonl'"),
    "weight-nan": ({"sources": [{"source": "a.jsonl", "weight": float("nan")}]}, {}, "data.sources[0].weight: not a"),
    "weight-percent": ({"sources": [{"source": "a.jsonl", "weight": "50%"}]}, {}, "data.sources[0].weight: not a num"),
    "validation-of-the-same": (
        {"source": "a.jsonl", "validation_source": "./a.jsonl"}, {}, "has the rows of 'a.jsonl', which are trained on"
    ),
    "validation-of-another": (
        {"sources": [{"source": "a.jsonl", "validation_source": "./b.jsonl"}, {"source": "b.jsonl"}]}, {},
        "has the rows of 'b.jsonl', which are trained on",
    ),
    "validation-of-nothing": ({"source": "a.jsonl", "validation_source": "empty.jsonl"}, {}, "empty.jsonl' has no row"),
    "validation-number": ({"source": "a.jsonl", "validation_source": 5}, {}, "data.validation_source: not a section"),
    "one-column": (
        {"source": "a.jsonl", "prompt_column": "prompt", "completion_column": "prompt"}, {},
        "data.prompt_column: 'prompt', as data.completion_column",
    ),
    "one-answer": (
        {"source": "pairs.jsonl", "chosen_column": "chosen", "rejected_column": "chosen"},
        {"objective": {"type": "dpo"}}, "data.chosen_column: 'chosen', as data.rejected_column",
    ),
    "cache": ({"prepared_url": "file:///dev/null/x", "cache_gib": 1e308}, {}, "data.cache_gib: not a valid value"),
    "store-in-a-file": (
        {"source": "a.jsonl", "prepared_url": "file:///dev/null/x"}, {}, "data.prepared_url: file:///dev/null/x/"
    ),
    "store-in-no-folder": (
        {"source": "a.jsonl", "prepared_url": "file:///proc/x"}, {}, "cannot be written: [Errno 2] No such file"
    ),
    "store-of-mixture": ({**BOTH, "prepared_url": "file:///proc/x"}, {}, "data.prepared_url: file:///proc/x/"),
    "store-unknown": ({"source": "a.jsonl", "prepared_url": "ftpx://a"}, {}, "install what fsspec needs for ftpx://"),
    "utf-16-text": ({"source": "wide.txt"}, TEXT, "5 of the 10 characters from line 1 on are null, as in UTF-16"),
    "template-range": (
        {"source": "a.jsonl", "template": "{% for i in range(10**9) %}{% endfor %}{{ prompt }}"}, {}, "Range too big"
    ),
    "template-class": ({"source": "a.jsonl", "template": "{{ prompt.__class__ }}"}, {}, "'__class__' of 'str' object"),
    "template-file": (
        {"source": "a.jsonl", "template": "{% include '/etc/passwd' %}{{ prompt }}"}, {}, "no loader for this environ"
    ),
    "no-role": ({"source": "b.jsonl", "train_on": ["tool"]}, {}, "without a token that carries loss"),
    "roles-of-none": ({"source": "a.jsonl", "train_on": ["user"]}, {}, "names roles, but the data's format is prompt_"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "others", "message"), SECTIONS.values(), ids=SECTIONS)
def test_a_section(tmp_path, monkeypatch, tokenizer, data, others, message):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        put(tmp_path / name, content)
    put(tmp_path / "wide.txt", "hello".encode("utf-16-le"))
    values = {"sequence_length": 64, "validation_fraction": 0.0, **data}
    with pytest.raises((ValueError, SpecError)) as caught:
        spec = RunSpec.model_validate({"data": values, "model": {"tokenizer": str(tokenizer)}, **others})
        prepare(recipe_of(spec), tmp_path / "out", report=lambda line: None, url=spec.data.prepared_url)
    assert message in str(caught.value), caught.value
    assert "data." in str(caught.value)


def test_a_store_that_does_not_answer_is_asked_again(tmp_path, tokenizer, monkeypatch):
    """A port that nobody listens on."""
    waited = []
    monkeypatch.setattr(shard_store.time, "sleep", waited.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "rows.jsonl").write_text(LINE)
    with pytest.raises(Unreachable, match=r"data.prepared_url: http://127.0.0.1:.* cannot be reached: .*Start again"):
        store = shard_store.ShardStore(f"http://127.0.0.1:{port}/rows")
        store.read("plan.json")
    assert waited == [1, 2, 4, 8, 16]


def template_folder(path):
    path.mkdir()


# The file `t.jinja`, and what is said.
TEMPLATES = {
    "missing": (lambda path: None, "data.chat_template '.*t.jinja': there is no file"),
    "pipe": (pipe, "data.chat_template '.*t.jinja' cannot be read: a named pipe"),
    "endless": (endless, "data.chat_template '.*t.jinja' cannot be read: a device"),
    "folder": (template_folder, "data.chat_template '.*t.jinja' cannot be read: Is a directory"),
    "loop": (loop, "data.chat_template '.*t.jinja' cannot be read: Too many levels of symbolic links"),
    "latin-1": (text("é".encode("latin-1")), "data.chat_template '.*t.jinja' cannot be read: .*; save it as UTF-8"),
    "syntax": (text("{{"), "data.chat_template: '.*t.jinja' is not a Jinja template: line 1"),
    "empty": (text(""), "rows.jsonl line 1: the chat template omits message 1"),
}


@pytest.mark.parametrize(("content", "message"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template(tmp_path, tokenizer, content, message):
    content(tmp_path / "t.jinja")
    (tmp_path / "rows.jsonl").write_text(json.dumps(TALK) + "\n")
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, tmp_path / "rows.jsonl", tokenizer, chat_template=str(tmp_path / "t.jinja"))


def test_there_are_sixty():
    assert len(SPECS) + len(DATA) + len(SECTIONS) + len(TOKENIZERS) + len(TEMPLATES) > 120
    assert sys.getrecursionlimit() < 100_000
