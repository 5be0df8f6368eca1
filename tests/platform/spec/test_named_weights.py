"""Every field that names weights is known, so that a folder that is not there is told before a run is sent."""

import pytest

from strata_platform.spec import RunSpec, SpecError
from strata_platform.spec.local_files import require_local_files
from strata_platform.spec.named_weights import named_weights

PROMPTS = {"source": "acme/prompts", "sequence_length": 512}
SPECS = {
    "model.name": {"model": {"name": "./none"}},
    "adapter.init_from": {"model": {"name": "acme/model"}, "adapter": {"type": "lora", "init_from": "./none"}},
    "objective.teacher": {"objective": {"type": "distill", "teacher": "./none"}},
    "objective.rewards[1].model": {
        "data": PROMPTS, "objective": {"type": "grpo", "rewards": [{"function": "a.b:c"}, {"model": "./none"}]},
    },
}  # fmt: skip


@pytest.mark.parametrize("field", SPECS)
def test_a_folder_of_weights_that_is_not_here_is_told(field):
    spec = RunSpec.model_validate(SPECS[field])
    assert [weights.field for weights in named_weights(spec) if weights.name == "./none"] == [field]
    with pytest.raises(SpecError) as error:
        require_local_files(spec)
    assert [problem.path for problem in error.value.problems] == [field]


def test_a_run_that_has_begun_needs_the_adapter_of_its_first_start_no_more(tmp_path):
    values = {"name": "x", "output": str(tmp_path), **SPECS["adapter.init_from"]}
    spec = RunSpec.model_validate(values)
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"adapter\.init_from"):
        require_local_files(spec)
    # The store may have a checkpoint.
    require_local_files(RunSpec.model_validate({**values, "checkpoint": {"url": "s3://bucket/runs"}}))
    (tmp_path / "x" / "checkpoints" / "checkpoint-1").mkdir()
    require_local_files(spec)


def test_a_preset_has_no_named_weights_and_a_configuration_alone_has_random_ones():
    assert not list(named_weights(RunSpec()))
    [found] = named_weights(RunSpec.model_validate({"model": {"name": "acme/model", "init": "random"}}))
    assert (found.field, found.random) == ("model.name", True)
