import os
import re
from pathlib import Path

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.reading.load import load_spec_argument

PAGE = Path(__file__).parents[4] / "docs/variants.md"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def problems_of(path):
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    return [str(problem) for problem in caught.value.problems]


def test_later_values_win_and_sections_are_merged(write):
    write(
        my="include: [team/base.yaml, h200.yaml]\noptimizer: {lr: 3.0e-5}\nadapter: {r: 32}",
        team__base="include: ../root.yaml\nseed: 5\noptimizer: {lr: 1.0e-5, betas: [0.8, 0.9]}\ntraining: {steps: 3}",
        root="seed: 1\nname: root\nmodel: {name: a/b}\nadapter: {type: lora, r: 4, use_dora: true}",
        h200="seed: 6\noptimizer: {betas: [0.7, 0.9]}\n",
    )
    assert load_spec("my.yaml") == RunSpec(
        seed=6,
        name="root",
        model={"name": "a/b"},
        optimizer={"lr": 3e-5, "betas": [0.7, 0.9]},
        training={"steps": 3},
        adapter={"type": "lora", "r": 32, "use_dora": True},
    )


def test_a_section_of_another_type_is_replaced_as_a_whole(write):
    write(
        base="model: {name: a/b}\nadapter: {type: lora, r: 4}\nschedule: {type: linear, warmup_ratio: 0.3}",
        my="include: base.yaml\nadapter: {type: none}\nschedule: {type: constant}",
    )
    spec = load_spec("my.yaml")
    assert spec.adapter.type == "none"
    # Every type of schedule has this field.
    assert (spec.schedule.type, spec.schedule.warmup_ratio) == ("constant", 0.3)


def test_errors_name_the_file_and_the_line_of_the_value(write):
    write(
        base="seed: 1\noptimizer:\n  lr: -1\n  eps: -1\ntraining: {stpes: 1}\ndata: {split: a, split: b}",
        my="include: base.yaml\noptimizer: {eps: -2}\nparallel: {type: dpp}\n",
    )
    assert [problem[: problem.index(":")] for problem in problems_of("my.yaml")] == [
        "optimizer.eps (line 2)",
        "parallel.type (line 3)",
        "optimizer.lr (base.yaml, line 3)",
        "training.stpes (base.yaml, line 5)",
        "data.split (base.yaml, line 6)",
    ]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("missing.yaml", "include (line 2): missing.yaml: cannot be read: No such file"),
        ("[base.yaml, missing.yaml]", "include[1] (line 2): missing.yaml: cannot be read"),
        ("https://example.org/base.yaml", "include (line 2): a URL; only files are included"),
        ("~/base.yaml", "include (line 2): begins with ~"),
        (".", "include (line 2): .: cannot be read: Is a directory"),
        ("pipe", "a named pipe, not a regular file"),
        ("wrong.yaml", "wrong.yaml, line 2: not valid YAML"),
        ("list.yaml", "include (line 2): list.yaml: not a mapping of fields to values"),
        ("my.yaml", "include (line 2): the files include each other: my.yaml -> my.yaml"),
        (
            "loop/a.yaml",
            "include (loop/b.yaml, line 1): the files include each other: my.yaml -> a.yaml -> b.yaml -> my.yaml",
        ),
        ("3", "include (line 2): not a valid value; given: 3; allowed: the path of a file, or a list"),
        ("[]", "include (line 2): not a valid value"),
        ("${NO_SUCH_VARIABLE}/base.yaml", "include (line 2): the environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_cannot_be_included(write, include, expected):
    write(
        my=f"seed: 1\ninclude: {include}",
        base="{}",
        wrong="a: b\nc: d: e",
        list="[1]",
        loop__a="include: b.yaml",
        loop__b="include: ../my.yaml",
    )
    os.mkfifo("pipe")
    (problem,) = problems_of("my.yaml")
    assert expected in problem


def test_one_file_may_be_included_twice_and_may_be_empty(write, monkeypatch):
    monkeypatch.setenv("WHERE", "team")
    write(
        my="include: ['${WHERE}/a.yaml', team/b.yaml]",
        team__a="include: c.yaml",
        team__b="include: c.yaml",
        team__c="# -",
    )
    assert load_spec("my.yaml") == RunSpec()


def test_a_text_and_standard_input_include_files_of_the_working_directory(write, monkeypatch):
    write(base="seed: 9")
    assert load_spec("include: base.yaml\nname: a").seed == 9
    with Path("base.yaml").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert load_spec_argument("-", ["name=b"]) == RunSpec(seed=9, name="b")


def test_aliases_without_an_end_end(write):
    write(base="model: &m\n  name: *m", my="include: base.yaml\nmodel: &m\n  name: *m")
    assert problems_of("my.yaml")


def test_the_examples_of_the_page(write, monkeypatch):
    text = PAGE.read_text()
    h200, mine, variables = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    write(h200=h200, work__my=mine.replace("h200", "../h200"), team__tracking="tracking: {project: bots}")
    spec = load_spec("work/my.yaml")
    assert (spec.parallel.type, spec.resources.cpu) == ("ddp", "16")
    assert (spec.name, spec.resources.gpu, spec.tracking.project) == ("support-bot", 8, "bots")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("BUCKET", raising=False)
    assert load_spec(variables).data.source == "s3://research/chats.jsonl"
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), {})
