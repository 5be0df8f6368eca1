"""A changed objective or reward function of the user's is noticed, without importing it."""

import sys
from fractions import Fraction

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.extensions import import_object
from tasks.runtime.extensions.import_object import code_digest, digest_by_name
from tasks.runtime.extensions.own_code import objective_code, warn_of_changed_code

REWARDS = [{"function": "own_rewards_here:short"}, {"function": "exact_match"}, {"model": "acme/scores"}]
PROMPTS = {"source": "acme/prompts", "sequence_length": 512}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tmp_path = tmp_path / "own"
    tmp_path.mkdir()
    (tmp_path / "own_rewards_here.py").write_text("import own_helper_here\ndef short(completions):\n    return [0.0]\n")
    (tmp_path / "own_helper_here.py").write_text("LONG = 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_object._sources.cache_clear()
    yield tmp_path
    import_object._sources.cache_clear()


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


@pytest.mark.parametrize("helper", ["raise RuntimeError('needs a GPU')", "a syntax error"])
def test_neither_it_nor_what_it_imports_runs_for_a_digest(folder, helper):
    """Its own process imports it, and tells what fails."""
    library = folder.parent / "library"
    library.mkdir()
    (library / "their_library_here.py").write_text("raise RuntimeError('needs another GPU')\n")
    sys.path.append(str(library))
    file = folder / "own_rewards_here.py"
    file.write_text("from their_library_here import score\nfrom own_helper_here import LONG\n")
    (folder / "own_helper_here.py").write_text(f"{helper}\n")
    try:
        before = digest_by_name("own_rewards_here:short", "strata.objectives")
        (folder / "own_helper_here.py").write_text(f"{helper} # edited\n")
        assert digest_by_name("own_rewards_here:short", "strata.objectives") != before
    finally:
        sys.path.remove(str(library))
    assert not {"own_rewards_here", "own_helper_here", "their_library_here"} & {*sys.modules}


def test_a_class_has_the_same_digest_by_its_name():
    assert digest_by_name("fractions:Fraction", "strata.objectives") == code_digest(Fraction)


def test_other_objectives_have_no_code():
    assert objective_code(RunSpec().objective) == {}
