"""A changed objective or reward function of the user's is noticed, without importing it."""

import sys
from fractions import Fraction

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.extensions.import_object import code_digest, digest_by_name
from tasks.runtime.extensions.own_code import objective_code, warn_of_changed_code

REWARDS = [{"function": "own_rewards_here:short"}, {"function": "exact_match"}, {"model": "acme/scores"}]
PROMPTS = {"source": "acme/prompts", "sequence_length": 512}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_rewards_here.py").write_text("import own_helper_here\ndef short(completions):\n    return [0.0]\n")
    (tmp_path / "own_helper_here.py").write_text("LONG = 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_changed_reward_function_is_told(folder, caplog):
    objective = RunSpec.model_validate({"data": PROMPTS, "objective": {"type": "grpo", "rewards": REWARDS}}).objective
    before = objective_code(objective)
    assert before.keys() == {"own_rewards_here:short"}
    warn_of_changed_code(objective, before)
    # Of a run whose code is not known.
    warn_of_changed_code(objective, {})
    assert not caplog.text
    (folder / "own_helper_here.py").write_text("LONG = 10\n")
    warn_of_changed_code(objective, before)
    assert "'own_rewards_here:short': its code has changed since the last step of this run" in caplog.text
    assert "choose another name" in caplog.text
    assert "own_rewards_here" not in sys.modules


def test_a_class_has_the_same_digest_by_its_name():
    assert digest_by_name("fractions:Fraction", "strata.objectives") == code_digest(Fraction)


def test_other_objectives_have_no_code():
    assert objective_code(RunSpec().objective) == {}
