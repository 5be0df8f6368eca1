"""Stages: files of specs, and the models that they use of each other."""

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.local_files import require_local_files
from strata_platform.spec.stages import (
    Stages,
    before_its_stages,
    load_stages,
    models_used,
    require_no_stages,
    with_models,
)


@pytest.fixture
def write(tmp_path):
    def files(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / "align.yaml"

    return files


SFT = "name: sft\noutput: /runs\n"
DPO = "include: sft.yaml\nname: dpo\nmodel: {name: run:sft}\nobjective: {type: dpo}\ndata: {source: a.jsonl}\n"


def test_files_are_read_as_specs_and_send_whole_values(write):
    stages = load_stages(write(align="stages: [sft.yaml, dpo.yaml]", sft=SFT, dpo=DPO))
    assert [(spec.name, spec.output) for spec in stages.stages] == [("sft", "/runs"), ("dpo", "/runs")]
    assert list(models_used(stages.stages[1])) == [("model.name", "sft")]
    assert Stages.model_validate_json(stages.model_dump_json()) == stages


def test_models_take_the_place_of_their_stages():
    spec = RunSpec(
        model={"name": "run:small", "tokenizer": "run:large"},
        objective={"type": "distill", "teacher": "run:large"},
        data={"source": "a.jsonl"},
    )
    assert dict(models_used(spec)) == {
        "model.name": "small", "model.tokenizer": "large", "objective.teacher": "large",
    }  # fmt: skip
    found = with_models(spec, {"small": "/runs/small/model", "large": "/runs/large/model"})
    assert (found.model.name, found.model.tokenizer) == ("/runs/small/model", "/runs/large/model")
    assert found.objective.teacher == "/runs/large/model" and not list(models_used(found))
    # Values of a model that is not known yet stay.
    assert with_models(spec, {"large": "x"}).model.name == "run:small"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"align": "stages: []"}, r"align\.yaml has 1 problem.*\n.*stages: must be a list of files"),
        ({"align": "stages: [sft.yaml]\nname: x"}, "stages: must be a list of files"),
        ({"align": "stages: [{name: a}]"}, "stages: must be a list of files"),
        ({"align": "stages: [none.yaml]"}, r"none\.yaml"),
        ({"align": "stages: [sft.yaml, dpo.yaml]", "dpo": DPO + "optimizer: {rl: 1}\n"},
         r"stages\[1\]\.optimizer\.rl \(dpo\.yaml, line 6\): no such field"),
        ({"align": "stages: [dpo.yaml, sft.yaml]"},
         r"stages\[0\]\.model\.name: no stage before this one has the name 'sft'; there are none; given: run:sft"),
        ({"align": "stages: [sft.yaml, sft.yaml]"}, r"stages\[1\]\.name: is that of stages\[0\]; give each its own"),
    ],
    ids=["none", "more", "inline", "missing", "mistake", "order", "name"],
)  # fmt: skip
def test_mistakes_are_told_with_their_stage_and_line(write, texts, said):
    with pytest.raises(SpecError, match=said):
        load_stages(write(**{"sft": SFT, "dpo": DPO, **texts}))


REWARDED = {"type": "grpo", "rewards": [{"model": "run:a"}, {"function": "exact_match"}]}
PROMPTS = {"source": "a.jsonl", "sequence_length": 1024}


@pytest.mark.parametrize(
    ("before", "fields", "said"),
    [
        ("sft", {"objective": REWARDED}, r"objective\.rewards\[0\]\.model: is a model of objective\.type 'sft', which"),
        ("reward", {"model": {"name": "run:a"}, "objective": REWARDED}, r"stages\[1\]\.model\.name: is a reward model"),
        ("reward", {"objective": {"type": "distill", "teacher": "run:a"}}, r"objective\.teacher: is a reward model"),
    ],
    ids=["reward", "model", "teacher"],
)
def test_a_model_that_scores_and_one_that_writes_are_not_taken_for_each_other(before, fields, said):
    first = RunSpec(name="a", data={"source": "a.jsonl"}, objective={"type": before})
    second = RunSpec.model_validate({"name": "b", "data": PROMPTS, "training": {"micro_batch_size": 8}, **fields})
    with pytest.raises(SpecError, match=said):
        Stages(stages=(first, second)).require_order()
    again = RunSpec(name="c", data={"source": "a.jsonl"}, model={"name": "run:a"}, objective={"type": before})
    Stages(stages=(first, again)).require_order()


def test_a_stage_is_checked_without_reward_models_that_do_not_exist_yet():
    spec = RunSpec(model={"name": "run:b"}, objective=REWARDED, data=PROMPTS)
    found = before_its_stages(spec, {"a": "base", "b": "base"})
    assert found.model.name == "base" and [term.title for term in found.objective.rewards] == ["exact_match"]
    assert not list(models_used(found))


def test_a_run_that_is_no_stage_names_no_stages():
    spec = RunSpec(objective=REWARDED, data=PROMPTS)
    for refused in (require_no_stages, require_local_files):
        with pytest.raises(SpecError, match=r"objective\.rewards\[0\]\.model: is the model of another stage.*run:a"):
            refused(spec)
    require_no_stages(with_models(spec, {"a": "/runs/a/model"}))


def test_only_fields_of_models_name_stages():
    rewards = [{"function": "regex", "arguments": {"pattern": "run: .*"}}, {"model": "run:reward"}]
    spec = RunSpec(
        objective={"type": "grpo", "rewards": rewards, "generation": {"max_new_tokens": 32, "stop": ["run:"]}},
        data={"source": "a.jsonl"},
    )
    assert list(models_used(spec)) == [("objective.rewards[1].model", "reward")]
    found = with_models(spec, {"reward": "/runs/reward/model", " .*": "x", "": "x"})
    assert found.objective.rewards[1].model == "/runs/reward/model"
    assert (found.objective.generation.stop, found.objective.rewards[0]) == (("run:",), spec.objective.rewards[0])


def test_two_stages_of_one_name_are_refused_wherever_they_write():
    stages = Stages(stages=(RunSpec(name="a", output="/one"), RunSpec(name="a", output="/two")))
    with pytest.raises(SpecError, match=r"stages\[1\]\.name: is that of stages\[0\]"):
        stages.require_order()


def test_a_stage_may_not_use_itself():
    with pytest.raises(SpecError, match=r"stages\[0\]\.model\.name: no stage before"):
        Stages(stages=(RunSpec(name="a", model={"name": "run:a"}),)).require_order()
