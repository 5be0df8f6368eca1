"""What a spec says of the names that other trainers give to settings."""

import re
from pathlib import Path

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.describe import sections
from strata_platform.spec.other_names import NAMES_IN_SOURCES, NO_FIELDS, OTHER_NAMES, OTHER_VALUES
from strata_platform.spec.sections.data import Reading


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_trainers_lead_to_fields_that_there_are(name):
    section, *rest = OTHER_NAMES[name].split(".")
    field = RunSpec.model_fields[section]
    for part in rest:
        field = next(of.model_fields[part] for of in sections(field).values() if part in of.model_fields)


def test_the_page_for_users_of_other_trainers_has_the_names_that_errors_know():
    page = (Path(__file__).parents[3] / "docs/other-trainers.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| `([\w.]+)` \|", page.split("## Names")[1], re.MULTILINE)
    listed = {name: field for names, field in rows for name in re.findall(r"`([\w.]+)`", names)}
    of_objectives = {name for name, field in OTHER_NAMES.items() if re.match(r"objective\.(?!type$)", field)}
    assert listed == {name: field for name, field in OTHER_NAMES.items() if name not in of_objectives}


def test_the_page_of_settings_to_leave_out_has_the_names_without_a_field():
    page = (Path(__file__).parents[3] / "docs/settings-to-leave-out.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert {name for names in rows for name in re.findall(r"`(\w+)`", names)} == {
        name.removeprefix(".") for name in NO_FIELDS
    }


@pytest.mark.parametrize(
    ("section", "name", "value", "meant"),
    [
        ("adapter", "lora_r", 8, "adapter.r"),
        ("optimizer", "learning_rate", 1e-5, "optimizer.lr"),
        ("data", "sequence_len", 2048, "data.sequence_length"),
        ("model", "template", "llama3", "data.chat_template"),
        ("training", "run_name", "a", "name"),
    ],
)
def test_a_name_of_another_trainer_leads_to_the_field_from_its_section_and_from_the_top(section, name, value, meant):
    base = {"adapter": {"type": "lora"}, "model": {"name": "folder"}}
    for spec in (base | {name: value}, base | {section: base.get(section, {}) | {name: value}}):
        with pytest.raises(SpecError, match=f"{name}: no such field; did you mean '{re.escape(meant)}'"):
            RunSpec.model_validate(spec)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("save_strategy", "epoch", "checkpoint.per_epoch: 1"),
        ("save_strategy", "steps", "checkpoint.every"),
        ("eval_strategy", "epoch", "evaluation.per_epoch: 1"),
        ("save_steps", 500, "checkpoint.every"),
        ("evals_per_epoch", 4, "evaluation.per_epoch"),
        ("evals_per_epoch", 0.5, "evaluation.per_epoch"),
        ("saves_per_epoch", 1, "checkpoint.per_epoch"),
        ("saves_per_epoch", 0.0, "checkpoint.per_epoch"),
    ],
)
def test_an_interval_in_epochs_leads_to_the_field_in_epochs(name, value, meant):
    with pytest.raises(SpecError, match=rf"{name}: no such field; did you mean '{re.escape(meant)}'"):
        RunSpec.model_validate({name: value})


@pytest.mark.parametrize(("name", "section"), [("save_steps", "checkpoint"), ("eval_steps", "evaluation")])
def test_a_share_of_steps_leads_to_the_field_in_epochs_with_its_value(name, section):
    problem = rf"{name}: no such field; 0\.1 of all steps is 10 / training\.epochs per epoch; .* '{section}\.per_epoch'"
    with pytest.raises(SpecError, match=problem):
        RunSpec.model_validate({name: 0.1})
    problem = (
        rf"{section}\.every: not a valid value: 0\.25 of an epoch is 4 per epoch, 0\.25 of all steps is 4 / training"
        rf"\.epochs per epoch; given: 0\.25; did you mean '{section}\.per_epoch: 4'"
    )
    with pytest.raises(SpecError, match=problem):
        RunSpec.model_validate({section: {"every": 0.25}})
    with pytest.raises(SpecError, match=r"0\.3 of an epoch is about 3 per epoch"):
        RunSpec.model_validate({section: {"every": 0.3}})
    with pytest.raises(SpecError, match=rf"given: 'epoch'; did you mean '{section}\.per_epoch: 1'"):
        RunSpec.model_validate({section: {"every": "epoch"}})
    with pytest.raises(SpecError, match=r"not a valid value; given: 2\.5; allowed"):
        RunSpec.model_validate({section: {"every": 2.5}})


@pytest.mark.parametrize(
    ("objective", "meant"),
    [
        ({"type": "grpo", "num_generations": 4}, "objective.group_size"),
        ({"type": "grpo", "temperature": 0.7}, "objective.generation.temperature"),
        ({"type": "grpo", "max_new_tokens": 99}, "objective.generation.max_new_tokens"),
        ({"type": "grpo", "max_prompt_length": 99}, "data.sequence_length"),
        ({"type": "dpo", "loss_type": "ipo"}, "objective.loss"),
        ({"type": "simpo", "simpo_gamma": 0.5}, "objective.gamma"),
    ],
)
def test_a_name_of_another_trainer_is_not_taken_for_one_that_is_merely_alike(objective, meant):
    """`num_generations` is like `num_iterations`, which means something else."""
    with pytest.raises(SpecError, match=f"no such field; did you mean '{re.escape(meant)}'"):
        RunSpec.model_validate({"objective": objective})


def test_a_setting_that_an_objective_lacks_is_not_sought_in_it():
    with pytest.raises(SpecError, match=r"objective\.num_generations: no such field; allowed"):
        RunSpec.model_validate({"objective": {"type": "dpo", "num_generations": 4}})
    with pytest.raises(SpecError, match=r"objective\.temperature: a field of type 'distill' alone"):
        RunSpec.model_validate({"objective": {"type": "dpo", "temperature": 0.7}})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("gradient_checkpointing", True, "training.gradient_checkpointing"),
        ("packing", True, "data.packing"),
        ("report_to", "none", "tracking.report_to"),
        ("streaming", True, "data.streaming"),
    ],
)
def test_a_field_of_a_section_is_not_taken_for_a_section_that_is_merely_alike(name, value, meant):
    """`gradient_checkpointing` is like `checkpoint`, `packing` like `tracking`. The sections are not listed again."""
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate({name: value})
    assert [str(problem) for problem in error.value.problems] == [f"{name}: no such field; did you mean '{meant}'?"]


@pytest.mark.parametrize("name", ["seed", "optimizer"])
def test_a_field_of_the_top_in_a_section_is_told_where_it_belongs(name):
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate({"training": {name: "a"}})
    (problem,) = error.value.problems
    assert str(problem) == f"training.{name}: no such field here; {name!r} stands at the top of the spec"


@pytest.mark.parametrize("name", NO_FIELDS)
def test_a_name_without_a_field_is_answered_by_what_to_do(name):
    given = name.removeprefix(".")
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate({given: "a"})
    assert [str(problem) for problem in error.value.problems] == [f"{given}: no such field; {NO_FIELDS[name]}"]


@pytest.mark.parametrize(
    ("section", "given", "meant"),
    [
        ("optimizer", {"name": "AdamW"}, "optimizer.type"),
        ("checkpoint", {"interval": 500}, "checkpoint.every"),
        ("quantize", {"linear": {}}, "training.float8"),
        # The same names elsewhere are other settings.
        ("schedule", {"name": "cosine"}, None),
        ("evaluation", {"interval": 500}, None),
        ("evaluation", {"metrics": ["accuracy"]}, None),
    ],
)
def test_names_of_torchtitan_lead_to_fields_in_the_section_that_they_stand_in(section, given, meant):
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate({section: given})
    (problem,) = error.value.problems
    assert (problem.message, problem.suggestion) == ("no such field", meant)


@pytest.mark.parametrize("bits", [8, "8"])
def test_eight_bits_are_answered_by_what_is_nearest(bits):
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate({"quantization_bit": bits})
    assert [problem.message for problem in error.value.problems] == [f"no such field; {NO_FIELDS['load_in_8bit']}"]
    with pytest.raises(SpecError, match=r"did you mean 'adapter\.quantization'"):
        RunSpec.model_validate({"quantization_bit": 4})


@pytest.mark.parametrize("name", NAMES_IN_SOURCES)
def test_names_of_axolotl_within_a_source_lead_to_fields_of_it(name):
    meant = NAMES_IN_SOURCES[name]
    assert meant in Reading.model_fields
    for data in ({"source": "a", name: "b"}, {"sources": [{"source": "a", name: "b"}]}):
        with pytest.raises(SpecError, match=rf"\.{name}: no such field; did you mean '{meant}'\?"):
            RunSpec.model_validate({"data": data})


def test_values_of_other_trainers_lead_to_values_that_there_are():
    assert OTHER_VALUES["optimizer.type"]["adamw_torch"] == "adamw"
    for path, values in OTHER_VALUES.items():
        section, name = path.split(".")
        variant = {"adapter": {"type": "lora"}, "objective": {"type": "dpo"}}.get(section, {}) if name != "type" else {}
        for value, meant in values.items():
            written = {"true": True, "false": False}.get(value, value)
            spec = {"model": {"name": "folder"}, section: variant | {name: written}}
            spec["model"] |= spec.pop("model") if section == "model" else {"name": "folder"}
            with pytest.raises(SpecError) as error:
                RunSpec.model_validate(spec | {"data": {"source": "a", **spec.get("data", {})}})
            problem = error.value.problems[0]
            assert (problem.path, problem.suggestion) == (path, meant)
            first = meant.split()[0]
            assert first in (problem.allowed or "") or first.startswith(("[", "objective.type:", "training.float8:")), (
                path
            )


def test_a_section_that_is_given_as_its_main_value_names_the_field_of_it():
    given = {"model": "some/model", "data": "a.jsonl", "adapter": "lora", "optimizer": "adamw_torch"}
    with pytest.raises(SpecError) as error:
        RunSpec.model_validate(given | {"schedule": "cosine", "parallel": "fsdp"})
    expected = ["model.name", "data.source", "adapter.type", "optimizer.type", "schedule.type", "parallel.type"]
    assert {problem.suggestion for problem in error.value.problems} == {*expected}
