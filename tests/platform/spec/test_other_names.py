"""What a spec says of the names that other trainers give to settings of objectives."""

import re

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
