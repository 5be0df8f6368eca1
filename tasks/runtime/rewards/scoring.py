"""All rewards of an objective together: their values for each answer, and the weighted sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from strata_platform.spec.run_spec import Objective
from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.data import PreparedData
from tasks.runtime.data.prompts import known_of
from tasks.runtime.rewards.functions import ColumnError, tests_of
from tasks.runtime.rewards.reward_function import Answers, RewardFunction
from tasks.runtime.rewards.reward_model import RewardModel, require_reward_model


class Rewards:
    """The rewards of `objective.rewards`.

    Raises:
        ValueError: one of them cannot be made here.
    """

    def __init__(self, terms: Sequence[RewardTerm], device: torch.device) -> None:
        self._terms = terms
        self._pending: Answers | None = None
        self._made = [
            RewardModel(term, number, device) if term.function is None else RewardFunction(term, number)
            for number, term in enumerate(terms)
        ]

    def score(self, answers: Answers) -> list[list[float | None]]:
        """`begin`, then `finish`."""
        self.begin(answers)
        return self.finish()

    def begin(self, answers: Answers) -> None:
        """Start to score answers: functions, which have processes of their own, go on beside what follows."""
        assert self._pending is None
        self._pending = answers
        for reward in self._made:
            if isinstance(reward, RewardFunction):
                reward.begin(answers)

    def finish(self) -> list[list[float | None]]:
        """The value that each reward gives to each answer, [rewards][answers]; None where it has none.

        Raises ValueError, which names the reward and the row, if one of them fails.
        """
        assert self._pending is not None
        answers, self._pending = self._pending, None
        return [
            reward.finish() if isinstance(reward, RewardFunction) else reward.score(answers) for reward in self._made
        ]

    def total(self, values: Sequence[float | None]) -> float:
        """The weighted sum of an answer's values, of which one that is missing counts 0; NaN if all are missing."""
        if all(value is None for value in values):
            return math.nan
        return sum(term.weight * (value or 0.0) for term, value in zip(self._terms, values, strict=True))


def require_rewards(objective: Objective) -> None:
    """Raises ValueError if a reward of the objective cannot be made here."""
    if objective.type != "grpo":
        return
    for number, term in enumerate(objective.rewards):
        if term.function is None:
            require_reward_model(term, number)
        else:
            RewardFunction(term, number).close()


def require_reward_columns(objective: Objective, data: PreparedData) -> None:
    """Raises ValueError if the rows lack a column that a reward needs, or have tests that cannot be used."""
    if objective.type != "grpo":
        return
    columns = known_of(data.train[0])["columns"]
    for number, term in enumerate(objective.rewards):
        if term.function is not None:
            function = RewardFunction(term, number)
            try:
                function.require_columns({*columns})
            finally:
                function.close()
        if term.function == "unit_tests":
            _require_tests(term, number, data)


def _require_tests(term: RewardTerm, number: int, data: PreparedData) -> None:
    column = str(term.arguments.get("column", "tests"))
    # Of rows that are still being prepared, the first alone.
    for rows, count in ((data.train, data.rows or 1), (data.validation, data.manifest.validation.rows or 0)):
        for index in range(count):
            known = known_of(rows[index])
            try:
                tests_of(known["columns"].get(column), column, index)
            except ColumnError as error:
                raise ValueError(f"objective.rewards[{number}]: {known['where']}: {error}") from None
