"""Functions of a user's in processes of their own: what they get, and what is said of those that fail."""

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.rewards.reward_function import Answers, RewardFunction
from tests.runtime.helpers import own_rewards

OWN = "tests.runtime.helpers.own_rewards:"
ANSWERS = Answers(
    prompts=["a b", "b c", "c d"],
    completions=["one", "two", "three"],
    token_ids=[[1], [2], [3, 4]],
    columns=[
        {"prompt": "a b", "wanted": "one"},
        {"prompt": "b c", "wanted": "x"},
        {"prompt": "c d", "wanted": "three"},
    ],
    where=[f"rows.jsonl:{line}" for line in (1, 2, 3)],
)


def function(name, **fields):
    return RewardFunction(RewardTerm(function=OWN + name if ":" not in name and name.islower() else name, **fields), 0)


def score(name, answers=ANSWERS, **fields):
    made = function(name, **fields)
    try:
        made.begin(answers)
        return made.finish()
    finally:
        made.close()


def test_a_function_gets_the_columns_that_it_takes():
    assert score("needs_column") == [1.0, 0.0, 1.0]
    assert score("varied") == [(sum(map(ord, text)) % 7) / 7 + 0.05 * len(text) for text in ANSWERS.completions]
    ones, none = score("rounded"), score("rounded", arguments={"least": 2})
    assert ones != none == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["waits", "waiting"])
def test_what_an_async_function_returns_is_awaited(name):
    assert score(name) == asyncio.run(getattr(own_rewards, name)(ANSWERS.completions, ["one", "x", "three"]))


def test_an_async_function_has_the_same_time_and_errors_as_others():
    with pytest.raises(ValueError, match=r"for rows.jsonl:2, answer 'two': KeyError: 'no b'"):
        score("waits_and_fails_for_b")
    with pytest.raises(ValueError, match=r"took more than 1 s for 3 answers"):
        score("waits_too_long", seconds=1)


def test_what_a_function_does_not_get_is_no_column_that_it_may_need():
    """It gets `prompts`: one that asks for `prompt` would fail at the first step."""
    made = function("needs_prompt")
    try:
        with pytest.raises(ValueError, match=r"needs_prompt' needs the column 'prompt', but the data has 'wanted'"):
            made.require_columns({"prompt", "wanted"})
    finally:
        made.close()


def test_completions_of_chats_are_messages():
    chats = Answers([[{"role": "user", "content": "Hi"}]], ["Ho"], [[1]], [{}], ["row 1"])
    assert chats.values()["completions"] == [[{"role": "assistant", "content": "Ho"}]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "fails_for_b",
            r"rewards\[0\]: .*fails_for_b.* for rows.jsonl:2, answer 'two': KeyError: 'no b', in line \d+ of",
        ),
        ("fails_together", r"fails_together' raised an error: KeyError: 'all of them'"),
        ("returns_nan", "nan, which is not a finite number"),
        ("ends", "ended with 3"),
        (
            "returns_text",
            r"returns_text' raised an error: NoRewardsError: it returned str '111', not a list of numbers",
        ),
        ("returns_mapping", r"it returned dict \{'0': 1.0"),
        ("returns_texts", r"it returned list, not a list of numbers: '1' is str"),
    ],
)
def test_an_error_names_function_row_and_exception(name, said):
    with pytest.raises(ValueError, match=said):
        score(name)


def test_a_slow_function_is_ended_and_can_be_called_again():
    made = function("is_slow", seconds=1)
    for _ in range(2):
        made.begin(ANSWERS)
        with pytest.raises(ValueError, match=r"took more than 1 s for 3 answers; raise objective\.rewards"):
            made.finish()
    made.close()


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("no_such_package.rewards:one", {}, "No module named 'no_such_package'.*must be installed"),
        (f"{OWN}none", {}, "has no 'none'"),
        (f"{OWN}needs_column", {"size": 1}, "it takes no argument 'size'; it takes: completions, wanted"),
    ],
    ids=["module", "attribute", "argument"],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(name, arguments, said):
    with pytest.raises(ValueError, match=said):
        function(name, arguments=arguments)


def test_a_missing_column_is_named():
    made = function("needs_column")
    with pytest.raises(ValueError, match="needs the column 'wanted', but the data has 'answer', beside"):
        made.require_columns({"prompt", "answer"})
    made.close()
    shipped = RewardFunction(RewardTerm(function="numeric", arguments={"column": "solution"}), 1)
    with pytest.raises(ValueError, match=r"rewards\[1\].*needs the column 'solution'"):
        shipped.require_columns({"prompt", "answer"})
    shipped.close()


def test_a_function_that_forks_answers_once():
    made = function("forks")
    for count in (3, 1, 2):
        cut = replace(ANSWERS, **{name: value[:count] for name, value in vars(ANSWERS).items()})
        made.begin(cut)
        assert made.finish() == [1.0] * count
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_what_a_slow_function_has_started_ends_with_it(tmp_path):
    with pytest.raises(ValueError, match="took more than 2 s"):
        score("leaves_processes", seconds=2, arguments={"folder": str(tmp_path)})
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            left += [process] if os.readlink(process / "cwd") == str(tmp_path) else []
    assert not left


def test_endless_answers_do_not_end_a_run():
    rows = [{"tests": "assert True"}] * 3
    endless = replace(ANSWERS, completions=["while True: pass"] * 3, columns=rows)
    made = RewardFunction(RewardTerm(function="unit_tests", seconds=1, arguments={"seconds": 60}), 0)
    made.begin(endless)
    assert made.finish() == [None] * 3
    made.close()
