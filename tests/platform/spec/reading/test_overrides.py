import re

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec, load_spec


def problems_of(text, *overrides):
    with pytest.raises(SpecError) as caught:
        load_spec(text, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_values_are_yaml_and_the_last_one_wins():
    spec = load_spec(
        "training: {steps: 5}\noptimizer: {lr: 1.0e-3, eps: 1.0e-9}",
        [
            "seed=1",
            "seed=012",
            "optimizer.lr=1e-5",
            "optimizer.betas=[0.8, 0.9]",
            "training.steps=null",
            "training.epochs = 3",
            "data.source=[a=b.jsonl, c.jsonl]",
            "name=on",
            "adapter={type: lora, r: 4}",
            "model.name=org/model",
        ],
    )
    assert spec == RunSpec(
        seed=12,
        optimizer={"lr": 1e-5, "eps": 1e-9, "betas": [0.8, 0.9]},
        training={"epochs": 3},
        data={"source": ["a=b.jsonl", "c.jsonl"]},
        name="on",
        adapter={"type": "lora", "r": 4},
        model={"name": "org/model"},
    )


def test_a_section_is_replaced_as_a_whole_and_another_type_drops_the_fields_of_the_old_one():
    text = (
        "model: {name: a/b}\nadapter: {type: lora, r: 4, use_dora: true}\nevaluation: {samples: 1, max_new_tokens: 2}"
    )
    assert load_spec(text, ["evaluation={samples: 5}"]).evaluation.max_new_tokens == 48
    assert load_spec(text, ["adapter.r=8"]).adapter.use_dora
    assert load_spec(text, ["adapter.type=none"]).adapter.type == "none"
    # Whatever the order: the type decides which fields there are.
    text = "objective: {type: dpo, beta: 0.2}\nmodel: {name: a/b}"
    spec = load_spec(text, ["objective.weight=0.1", "objective.type=distill", "objective.teacher=a/c"])
    assert (spec.objective.type, spec.objective.weight) == ("distill", 0.1)


def test_sections_that_share_an_anchor_are_changed_apart():
    with pytest.raises(SpecError) as caught:
        load_spec(
            "data: &x {revision: a}\nmodel: *x", ["data.source=org/rows", "model.name=org/model", "model.dtpye=1"]
        )
    assert [problem.path for problem in caught.value.problems] == ["model.dtpye"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainig.steps=3", "trainig (--set trainig.steps=3): no such field; did you mean 'training'?"),
        ("training.stpes=3", "training.stpes (--set training.stpes=3): no such field; did you mean 'steps'?"),
        ("optimizer.lr=-1", "optimizer.lr (--set optimizer.lr=-1): not a valid value; given: -1"),
        ("optimizer.lr", "--set optimizer.lr: no =; write FIELD=VALUE"),
        ("optimizer..lr=1", "--set optimizer..lr=1: the field has an empty part"),
        ("data.source[0]=a", "set the whole list: data.source=[...]"),
        ("include=a.yaml", "only files include others"),
        ("data.source=*.jsonl", "data.source (--set data.source=*.jsonl): not valid YAML, column 2: "),
        ("data={split: a, split: b}", "data.split (--set data={split: a, split: b}): given twice"),
        ("seed.x=1", "seed.x (--set seed.x=1): seed has the value 1, and no fields"),
        ("training.steps=1:30", "not a number: YAML 1.1 reads it as 90"),
        ("seed=${NO_SUCH_VARIABLE}", "seed (--set seed=${NO_SUCH_VARIABLE}): the environment variable"),
    ],
)
def test_errors_name_the_override(override, expected):
    (problem,) = problems_of("seed: 1\ntraining: {epochs: 2}", override)
    assert expected in problem


def test_problems_of_the_file_come_first():
    found = problems_of("sed: 1\nnaem: a", "optimizer.lr=-1", "foo")
    assert [problem.split()[0] for problem in found] == ["sed", "naem", "--set", "optimizer.lr"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.message_keys={role:by}", "'role:by' is one key; YAML needs a space after a colon: {role: by}"),
        ("data.roles={user:buyer}", "'user:buyer' is one key; YAML needs a space after a colon: {user: buyer}"),
        (
            "optimizer={lr:1e-5}",
            "optimizer.lr:1e-5: 'lr:1e-5' is one key; YAML needs a space after a colon: {lr: 1e-5}",
        ),
        ("objective={type:pretrain}", "'type:pretrain' is one key; YAML needs a space after a colon: {type: pretrain}"),
        ("objective=type:pretrain", "'type:pretrain' is one value; YAML needs a space after a colon: {type: pretrain}"),
        ("schedule=type:linear", "'type:linear' is one value; YAML needs a space after a colon: {type: linear}"),
    ],
)
def test_a_mapping_without_a_space_after_its_colon_shows_the_right_form(override, problem):
    with pytest.raises(SpecError, match=re.escape(problem)):
        load_spec("{}", [override])
    section, value = override.replace(":", ": ").split("=", 1)
    assert load_spec("{}", [f"{section}={value if value.startswith('{') else f'{{{value}}}'}"])


@pytest.mark.parametrize("given", ["adapter=qwen:7b", "objective={}", "objective={beta:1}"])
def test_a_colon_elsewhere_is_no_missing_space(given):
    assert not any("space after a colon" in problem for problem in problems_of("{}", given))
