"""A finished run that is given more steps has the bits of one that was asked for as many at first."""

import shutil

import pytest

from strata_platform.spec import RunSpec, load_spec
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import STEPS, curve, make_spec
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")


def of_length(output, name, framework, steps, schedule):
    spec = make_spec(output, name, framework, "single", 1, steps=steps)
    return RunSpec.model_validate({**spec.model_dump(), "schedule": schedule})


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_a_finished_run_goes_on_and_decays(tmp_path, framework):
    constant = {"type": "constant", "warmup_steps": 1}
    train_spec(of_length(tmp_path, "longer", framework, STEPS, constant))
    # Half of the steps decay, from the first new one on.
    decayed = {"type": "wsd", "warmup_steps": 1, "decay_ratio": 0.5}
    longer = of_length(tmp_path, "longer", framework, 2 * STEPS, decayed)
    train_spec(longer)
    at_once = of_length(tmp_path, "at-once", framework, 2 * STEPS, decayed)
    train_spec(at_once)
    assert curve(longer) == curve(at_once)
    rates = [rate for *_, rate, _, _ in curve(longer)]
    assert rates[STEPS - 1] == rates[1] > rates[-1]
    record = CompletionRecord.load(RunFolder.of(longer).record)
    assert (record.status, record.steps, record.steps_asked) == ("complete", 2 * STEPS, 2 * STEPS)
    # Without checkpoints, all steps are still done.
    shutil.rmtree(RunFolder.of(longer).checkpoints)
    with pytest.raises(ValueError, match=rf"only if the {2 * STEPS} steps that are done"):
        train_spec(of_length(tmp_path, "longer", framework, 3 * STEPS, {}))
    assert load_spec(RunFolder.of(longer).spec) == longer
