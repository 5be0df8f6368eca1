"""What is told of a step's answers."""

import torch

from strata_platform.spec.sections.objectives import Grpo
from tasks.runtime.data.prompts import Prompt
from tasks.runtime.generation import Sample
from tasks.runtime.objectives.rollout import Rollout
from tasks.runtime.objectives.scored_answers import Drawn, Written, step_of
from tasks.runtime.process.ranks import Processes
from tasks.runtime.rewards.reward_function import Answers
from tasks.runtime.rewards.scoring import Rewards


def test_the_reward_that_is_logged_is_the_one_that_is_learned_from():
    """An answer that was cut has at most the lowest reward of its group."""
    settings = Grpo.model_validate({"rewards": [{"function": "exact_match"}], "group_size": 2})
    prompts = [Prompt((1, 2), {}, number) for number in range(2)]
    samples = [Sample(torch.tensor([3]), torch.zeros(1), finished) for finished in (True, False)]
    answers = Answers(["p"] * 2, ["a", "b"], [[3]] * 2, [{}] * 2, ["row"] * 2)
    rollout = Rollout(settings, None, None, Rewards(settings.rewards, torch.device("cpu")), None)
    drawn, values = Drawn(prompts, samples, answers, 1.0), [[-0.5, 0.0]]
    outcome = rollout._outcome(drawn, values, Processes())
    step = step_of(settings, drawn, values, [outcome], Written.of(outcome), torch.ones(4), 0)
    assert [(each["answer"], each["reward"]) for each in step.logged] == [("a", -0.5), ("b", -0.5)]
    assert step.metrics["reward"] == -0.5
