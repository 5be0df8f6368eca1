"""From one spec to the runs of a sweep."""

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.grid import Grid


def test_every_combination_is_a_run_with_a_name_of_its_own():
    base = RunSpec(name="base", seed=7)
    runs = Grid(fields={"optimizer.lr": [1e-4, 2e-4], "training.micro_batch_size": [1, 2, 4]}).runs(base)
    assert [run.name for run in runs] == [f"base-{number:03d}" for number in range(1, 7)]
    assert [(run.optimizer.lr, run.training.micro_batch_size) for run in runs[1:4]] == [(1e-4, 2), (1e-4, 4), (2e-4, 1)]
    assert all(run.model_copy(update={"name": "base"}).seed == 7 for run in runs)


def test_a_section_of_another_type_starts_from_its_defaults():
    base = RunSpec.model_validate({"model": {"name": "org/model"}, "adapter": {"type": "lora", "r": 64}})
    (kept,) = Grid(fields={"adapter.r": [8], "adapter.type": ["lora"]}).runs(base)
    off, same = Grid(fields={"adapter.type": ["none", "lora"]}).runs(base)
    assert (kept.adapter.r, off.adapter.type, same.adapter.r) == (8, "none", 64)


def test_forward_passes_of_a_step_follow_its_tokens():
    def passes(base, **fields):
        runs = Grid(fields=fields).runs(RunSpec.model_validate({"training": base}))
        return [run.training.gradient_accumulation_steps for run in runs]

    tokens, rows = "training.tokens_per_step", "training.micro_batch_size"
    assert passes({}, **{tokens: [4096, 8192]}) == [4, 8]
    assert passes({"tokens_per_step": 16384}, **{rows: [4, 8, 16]}) == [16, 8, 4]
    with pytest.raises(SpecError, match=r"gradient_accumulation_steps is 3; leave one of them out"):
        passes({"gradient_accumulation_steps": 3}, **{tokens: [4096]})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "empty; give a field and its values"),
        ({"optimizer.lr": []}, "fields.optimizer.lr: has no values"),
        ({"name": ["a", "b"]}, "fields.name: every run has its own name"),
        ({"seed": list(range(20)), "optimizer.lr": [1e-4] * 20}, "400 combinations, more than 256"),
        ({"optimizer.learning_rate": [1e-4]}, "optimizer.learning_rate"),
        ({"nowhere.lr": [1e-4]}, "nowhere"),
        ({"optimizer..lr": [1e-4]}, "fields.optimizer..lr: has an empty part; write a path such as optimizer.lr"),
        ({".seed": [1]}, "fields..seed: has an empty part"),
        ({"seed.": [1]}, "fields.seed.: has an empty part"),
        ({"": [1]}, "has an empty part"),
        ({"seed.lr": [1e-4]}, "fields.seed.lr: seed has a value and no fields; sweep seed"),
        ({"optimizer.lr": [1e-4, 5]}, "optimizer.lr"),
        ({"training.steps": [10], "training.epochs": [1]}, "contradicts training.epochs"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_any_is_started(fields, said):
    with pytest.raises(SpecError) as refused:
        Grid(fields=fields).runs(RunSpec())
    assert said in str(refused.value)


def test_a_problem_of_all_runs_is_told_once():
    with pytest.raises(SpecError) as refused:
        Grid(fields={"optimizer.lr": [2, 3], "seed": [1, 2, 3]}).runs(RunSpec())
    assert str(refused.value).count("given: 2") == 1
