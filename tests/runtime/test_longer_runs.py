"""A finished run that is given more steps has the bits of one that was asked for as many at first."""

import shutil

import pytest

from strata_platform.spec import RunSpec, load_spec
from tasks.runtime import checkpoint
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, curve, make_spec
from tests.runtime.helpers.train_only import forget, train_spec

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
    refused(longer, of_length(tmp_path, "longer", framework, 3 * STEPS, {}), 2 * STEPS)


def test_a_run_ends_earlier_or_where_its_decay_began(tmp_path):
    """Without the checkpoints after that, as the documentation advises."""
    decayed = {"type": "wsd", "warmup_steps": 1, "decay_ratio": 0.5}
    spec = of_length(tmp_path, "shorter", "torch", 2 * SAVED, decayed)
    train_spec(spec)
    constant = {"type": "constant", "warmup_steps": 1}
    shorter = of_length(tmp_path, "shorter", "torch", SAVED, constant)
    refused(spec, shorter, 2 * SAVED)
    checkpoint.discard_after(RunFolder.of(spec).checkpoints, SAVED)
    record = train_spec(shorter)
    assert (record.status, record.steps, record.steps_asked) == ("complete", SAVED, SAVED)
    assert record.train_loss == curve(shorter)[SAVED - 1][1]


def test_learning_rates_of_an_unfinished_run_stay(tmp_path):
    linear = {"type": "linear", "warmup_steps": 0}
    spec = of_length(tmp_path, "unfinished", "torch", 2 * SAVED, linear)
    train_spec(spec)
    forget(spec, SAVED)
    refused(spec, of_length(tmp_path, "unfinished", "torch", 3 * SAVED, linear), SAVED)


def refused(spec, other, done):
    """Nothing of the run changes."""
    with pytest.raises(ValueError, match=f"at least the {done} steps that are done"):
        train_spec(other)
    assert load_spec(RunFolder.of(spec).spec) == spec
