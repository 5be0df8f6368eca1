"""What a spec says of the names that other trainers give to settings."""

import re
from pathlib import Path

import pytest

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from strata_platform.spec.describe import sections
from strata_platform.spec.other_names import OTHER_NAMES


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_trainers_lead_to_fields_that_there_are(name):
    section, *rest = OTHER_NAMES[name].split(".")
    field = RunSpec.model_fields[section]
    for part in rest:
        field = next(of.model_fields[part] for of in sections(field).values() if part in of.model_fields)


def test_the_page_for_users_of_other_trainers_has_the_names_that_errors_know():
    page = (Path(__file__).parents[3] / "docs/other-trainers.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| `([\w.]+)` \|", page.split("## Names")[1], re.MULTILINE)
    listed = {name: field for names, field in rows for name in re.findall(r"`(\w+)`", names)}
    settings = {name: field for name, field in OTHER_NAMES.items() if not field.startswith("objective.")}
    assert listed == settings | {"rl": "objective.type"}


@pytest.mark.parametrize(
    ("section", "name", "value", "meant"),
    [
        ("adapter", "lora_r", 8, "adapter.r"),
        ("optimizer", "learning_rate", 1e-5, "optimizer.lr"),
        ("data", "sequence_len", 2048, "data.sequence_length"),
    ],
)
def test_a_name_of_another_trainer_leads_to_the_field_from_its_section_and_from_the_top(section, name, value, meant):
    base = {"adapter": {"type": "lora"}, "model": {"name": "folder"}}
    for spec in (base | {name: value}, base | {section: base.get(section, {}) | {name: value}}):
        with pytest.raises(SpecError, match=f"{name}: no such field; did you mean '{re.escape(meant)}'"):
            RunSpec.model_validate(spec)


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
