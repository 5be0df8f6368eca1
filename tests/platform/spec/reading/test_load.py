import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, dump_spec, load_spec
from strata_platform.spec.reading.load import load_spec_argument
from strata_platform.spec.yaml_core import dump_yaml, read_yaml

EXAMPLES = Path(__file__).parents[4] / "examples"

# PyYAML writes what Unicode has no character for, but does not read it.
words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=12)
fields = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True),
        "seed": st.integers(0, 2**32 - 1),
        "output": words.filter(lambda path: not path.startswith("~") and "://" not in path),
        "model": st.fixed_dictionaries({}, optional={"name": words, "dtype": st.sampled_from(["auto", "float32"])}),
        "data": st.fixed_dictionaries(
            {"source": words | st.lists(words, min_size=1, max_size=3)},
            optional={
                "text_column": words,
                "packing": st.booleans(),
                "validation_fraction": st.floats(0, 0.5),
                "max_samples": st.none() | st.integers(1, 10**12),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(0, 1, exclude_min=True),
                "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
            },
        ),
        "parallel": st.just({"type": "single"})
        | st.builds(lambda mb: {"type": "ddp", "bucket_cap_mb": mb}, st.integers(1, 65536)),
        "kernels": st.fixed_dictionaries(
            {}, optional={"exclude": st.lists(st.sampled_from(["rope", "swiglu"])), "enabled": st.booleans()}
        ),
    },
)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(fields)
def test_yaml_json_and_python_are_the_same_spec(values):
    spec = RunSpec(**values)
    texts = [
        dump_yaml(values) + "\n",
        json.dumps(values) + "\n",
        json.dumps(values, indent="\t", ensure_ascii=False).replace("\t", " "),
        dump_spec(spec, "yaml"),
        dump_spec(spec, "json"),
    ]
    for text in texts:
        loaded = load_spec(text)
        assert loaded == spec
        assert loaded.hash() == spec.hash()
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def error_of(path_or_text):
    with pytest.raises(SpecError) as caught:
        load_spec(path_or_text)
    return caught.value


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(path):
    spec = load_spec(path)
    assert load_spec(dump_spec(spec, "yaml")) == spec


def test_the_tiny_example_is_the_default():
    assert load_spec(EXAMPLES / "tiny-llama.yaml") == RunSpec()


def test_a_text_a_path_and_the_name_of_a_file_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("spec").write_text("seed: 7")
    Path("spec.yaml").write_text("seed: 8")
    assert load_spec("spec").seed == 7
    assert load_spec("spec.yaml").seed == 8
    assert load_spec(Path("spec")).seed == 7
    assert load_spec("seed: 9").seed == 9
    assert load_spec("{}") == RunSpec()


def test_a_file_that_is_not_there():
    assert "missing.yaml has 1 problem:\n  cannot be read: No such file" in str(error_of("missing.yaml"))
    assert "there is no such file either" in str(error_of("missing"))
    assert "there is no such file either" in str(error_of("x" * 5000))


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: café".encode("latin-1"))
    assert "not UTF-8: byte 9 is 0xe9" in str(error_of(tmp_path / "latin.yaml"))
    assert "cannot be read: Is a directory" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pipe.yaml", "a named pipe, not a regular file"),
        ("/dev/zero", "a device, not a regular file"),
        ("loop", "levels"),
    ],
)
def test_files_without_an_end_are_not_read(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    Path("loop").symlink_to("loop")
    assert message in str(error_of(Path(path)))


def test_a_file_or_a_stream_that_is_no_spec_is_not_read_whole(tmp_path, monkeypatch):
    (tmp_path / "weights.yaml").write_text("x" * (5 << 20))
    assert "longer than 4 MiB" in str(error_of(tmp_path / "weights.yaml"))
    with Path("/dev/zero").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with pytest.raises(SpecError, match="standard input has 1 problem:\n  longer than"):
            load_spec_argument("-")


def test_standard_input_is_counted_in_bytes_and_read_as_utf_8(tmp_path, monkeypatch):
    # In a locale of another encoding, too.
    for content, message in (
        ("# é" * (1 << 20) + "é" * (1 << 20), "longer than 4 MiB"),
        ("name: caf\udce9", "not UTF-8: byte 9 is 0xe9"),
    ):
        (tmp_path / "spec.yaml").write_bytes(content.encode(errors="surrogateescape"))
        with (tmp_path / "spec.yaml").open(encoding="latin-1") as stream:
            monkeypatch.setattr("sys.stdin", stream)
            with pytest.raises(SpecError, match=message):
                load_spec_argument("-")
    (tmp_path / "spec.yaml").write_text("output: é", encoding="utf-8")
    with (tmp_path / "spec.yaml").open(encoding="latin-1") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert load_spec_argument("-").output == "é"


def test_a_byte_order_mark_is_no_part_of_the_first_field(tmp_path):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfseed: 1")
    assert load_spec(tmp_path / "bom.yaml").seed == 1


def test_json_with_tabs_and_escapes(tmp_path):
    text = json.dumps({"output": "a\tb \U0001f600"}, indent="\t").replace("/", r"\/")
    (tmp_path / "spec.json").write_text(text)
    assert load_spec(tmp_path / "spec.json").output == "a\tb \U0001f600"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("seed: 1\nname: [a", 2, "expected ',' or ']'"),
        ("seed: 1\nname: a: b", 2, "mapping values are not allowed here"),
        ("data:\n\tsplit: a", 2, "cannot start any token"),
        ("seed: 1\n--- \nseed: 2", 2, "another document"),
        ("seed: *one", 1, "undefined alias"),
        ("? [a, b]\n: 1", 1, "unhashable key"),
        ("seed: !!python/name:os.system ''", 1, "could not determine a constructor"),
        ("name: a\nseed: \x01", 2, "special characters are not allowed"),
        ("seed: !!int x", None, "put it in quotes if it is text"),
        ("[" * 5000, None, "nested too deeply"),
        ("", None, "empty"),
        ("# only a comment\n", None, "empty"),
        ("- a\n- b", None, "not a mapping"),
        ("3\n", None, "not a mapping"),
    ],
)
def test_texts_that_are_no_spec(text, line, message):
    (problem,) = error_of(text).problems
    assert (problem.path, problem.line) == ("", line)
    assert message in problem.message


def test_keys_given_twice_are_told_with_both_lines():
    error = error_of("seed: 1\ndata:\n  packing: true\n  packing: 3\nseed: 2")
    assert [(problem.path, problem.line, problem.message) for problem in error.problems] == [
        ("data.packing", 4, "given twice, first in line 3; keep one"),
        ("data.packing", 4, "not true or false"),
        ("seed", 5, "given twice, first in line 1; keep one"),
    ]
    assert [problem.path for problem in error_of('{"seed": 1, "seed": 1}').problems] == ["seed"]


def test_problems_come_in_the_order_of_the_file_and_name_it(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "topology: {nnodes: 2}\nkernels:\n  exclude:\n  - rope\n  - rms\nparallel:\n  type: single\nsed: 1\n"
    )
    error = error_of(path)
    assert [(problem.path, problem.line) for problem in error.problems] == [
        ("kernels.exclude[1]", 5),
        ("parallel.type", 7),
        ("sed", 8),
    ]
    assert str(error).startswith(
        f"{path} has 3 problems:\n  kernels.exclude[1] (line 5): not a valid value; given: 'rms'"
    )


def test_a_problem_of_a_field_that_the_file_leaves_out_has_no_line():
    (problem,) = error_of("topology: {nnodes: 2}").problems
    assert (problem.path, problem.line) == ("parallel.type", None)


def test_keys_are_texts_whatever_yaml_takes_them_for():
    assert [problem.path for problem in error_of("on: 1\n2: 3\nnull: 4").problems] == ["on", "2", "null"]


def test_numbers_that_yaml_takes_for_texts():
    spec = load_spec("optimizer: {lr: 1e-4, eps: 1E-10}\ntraining: {steps: 1e3}")
    assert (spec.optimizer.lr, spec.optimizer.eps, spec.training.steps) == (1e-4, 1e-10, 1000)


# As in https://yaml.org/spec/1.2.2/#103-core-schema.
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("012", 12), ("-0", 0), ("+7", 7), ("0o14", 12), ("0x1F", 31), ("10", 10),
        ("1e-5", 1e-5), ("1E5", 1e5), ("5.", 5.0), (".5", 0.5), ("1.0e+3", 1e3), (".inf", float("inf")),
        ("true", True), ("False", False), ("TRUE", True), ("null", None), ("~", None), ("", None),
        ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"), ("1_000", "1_000"), ("0b101", "0b101"), ("0x_1", "0x_1"),
        ("on", "on"), ("Off", "Off"), ("yes", "yes"), ("No", "No"), ("y", "y"), ("2024-01-02", "2024-01-02"),
        ("=", "="), ("1e", "1e"), ("0o8", "0o8"), ("1.2.3", "1.2.3"), ("e5", "e5"), ("tRue", "tRue"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(written, value):
    found = read_yaml(f"a: {written}\nb: [{written or 'null'}]", "test").value
    assert found == {"a": value, "b": [value]} and type(found["a"]) is type(value)
    dumped = dump_yaml(found)
    assert read_yaml(dumped, "test").value == found
    # Other tools, which follow YAML 1.1, read the same.
    assert yaml.safe_load(dumped) == found


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("training: {steps: 1:30}", "training.steps", "not a number: YAML 1.1 reads it as 90, YAML 1.2 as text"),
        ("training: {steps: 1_000}", "training.steps", "reads it as 1000, YAML 1.2 as text; write 1000"),
        ("optimizer: {lr: 1_0.5}", "optimizer.lr", "reads it as 10.5"),
        ("data: {packing: on}", "data.packing", "YAML 1.1 reads it as true, YAML 1.2 as text; write true"),
        ("data: {packing: No}", "data.packing", "write false"),
        ("data: {packing: maybe}", "data.packing", "not true or false"),
        ("training: {steps: many}", "training.steps", "not a number"),
    ],
)  # fmt: skip
def test_what_yaml_1_1_reads_otherwise_is_told(text, path, message):
    (problem,) = error_of(text).problems
    assert (problem.path, problem.line) == (path, 1)
    assert message in problem.message


def test_words_of_yaml_1_1_are_texts():
    spec = load_spec("data: {source: a/b, split: on, text_column: no, subset: 1:30}\ntraining: {steps: 012}")
    assert (spec.data.split, spec.data.text_column, spec.data.subset, spec.training.steps) == ("on", "no", "1:30", 12)
    assert load_spec(dump_spec(spec)) == spec


def test_merges_of_merges_do_not_double_the_mapping():
    levels = [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)]
    found = read_yaml("\n".join(["a0: &a0 {x: 1, y: 2}", *levels]), "test").value
    assert found["a39"] == {"x": 1, "y": 2}


def test_anchors_and_merges():
    spec = load_spec("data: &data {split: a, packing: false}\n<<: {seed: 4}\n")
    assert (spec.data.split, spec.data.packing, spec.seed) == ("a", False, 4)
    assert load_spec("data:\n  <<: {split: a, packing: false}\n  split: b\n").data.split == "b"


def test_an_alias_of_its_own_parent_ends():
    (problem,) = error_of("model: &model\n  name: *model").problems
    assert (problem.path, problem.line) == ("model.name", 2)
