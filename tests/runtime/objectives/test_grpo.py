"""The loss of a micro-batch of answers, and what is left of earlier steps."""

import json
from types import SimpleNamespace

import pytest
import torch

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import RewardTerm
from tasks.runtime.data.dataset import COLUMNS, collate
from tasks.runtime.data.prompts import ANSWER, Prompt
from tasks.runtime.generation import Sample
from tasks.runtime.objectives.grpo import Grpo
from tasks.runtime.objectives.rollout import Rollout
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes
from tasks.runtime.rewards.scoring import Rewards

SIZE, LENGTH, CAP = 2, 6, 1.2


def objective_of(output="output", checkpoint=None, **options):
    spec = RunSpec.model_validate(
        {
            "output": output,
            "data": {"source": "prompts.jsonl", "sequence_length": 64, "format": "prompt"},
            "objective": {
                "type": "grpo",
                "rewards": [{"function": "exact_match"}],
                "group_size": SIZE,
                "generation": {"max_new_tokens": 4},
                **options,
            },
            "training": {"micro_batch_size": SIZE},
            "checkpoint": checkpoint or {"every": 2},
        }
    )
    return Grpo(spec, fused=False)


def test_what_the_policy_has_become_is_in_the_ratio_alone():
    """As TRL computes it, here in fp64: the weight of a clipped term is min(p_old / p_generated, cap)."""
    torch.manual_seed(0)
    logits = torch.randn(SIZE, LENGTH, 5, dtype=torch.float64)
    ids = torch.randint(5, (SIZE, LENGTH))
    labels = ids.clone()
    labels[:, :2] = -100
    answered = torch.arange(LENGTH).expand(SIZE, LENGTH).clamp(1, LENGTH - 2) == torch.arange(LENGTH)
    sequence = answered * torch.tensor([[1], [2]])
    now = logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]
    old = now + 0.3 * torch.randn(now.shape, dtype=torch.float64)
    generated = old + 0.3 * torch.randn(now.shape, dtype=torch.float64)
    advantage = torch.tensor([[0.7], [-0.4]], dtype=torch.float64)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(LENGTH).expand(SIZE, LENGTH),
        "sequence": sequence,
        "counted": sequence,
        "advantage": advantage * (torch.arange(LENGTH) == 1),
        "old": old,
        "generated": generated,
    }
    objective = objective_of(num_iterations=2, importance_cap=CAP, epsilon=0.2)
    tokens = int(answered.sum())
    objective._step = SimpleNamespace(answers=SIZE, tokens=tokens, metrics={})
    share = objective.micro_batch_loss(lambda **_: SimpleNamespace(logits=logits), batch, torch.tensor(SIZE))

    ratio, weight = (now - old).exp(), (old - generated).exp().clamp(max=CAP)
    terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * weight
    assert ((old - generated).exp() > CAP)[answered].any() and ((ratio - 1).abs() > 0.2)[answered].any()
    assert float(share.loss) == pytest.approx(float(terms[answered].sum() / tokens), rel=1e-6)
    difference = (old - generated).abs()[answered].mean()
    assert float(share.metrics["generation_difference"]) == pytest.approx(float(difference), rel=1e-6)


def prompts(first):
    known = {"prompt": "b", "columns": {}, "where": ""}
    return [Prompt((1, 2), known, number) for number in range(first, first + SIZE)]


def batch_of(first):
    """As the loader yields it."""
    found = prompts(first)
    known = torch.tensor([list(json.dumps(prompt.known).encode()) for prompt in found], dtype=torch.uint8)
    return {
        "input_ids": torch.tensor([prompt.token_ids for prompt in found]),
        "labels": torch.tensor([[-100, 2]] * SIZE),
        ANSWER: torch.tensor([[prompt.answer] * 2 for prompt in found]),
        COLUMNS: known,
    }


def answering(objective):
    """The numbers of the answers that are asked for from here on, a list for each question."""
    asked = []

    def generate(requests, sampling):
        asked.append([request.key for request in requests])
        return [Sample(torch.tensor([1]), torch.zeros(1), True) for _ in requests]

    generator = SimpleNamespace(generate=generate, update_weights=lambda: None)
    rewards = Rewards([RewardTerm(function="tests.runtime.helpers.own_rewards:varied")], torch.device("cpu"))
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "a")
    objective._rollout = Rollout(objective._settings, generator, None, rewards, tokenizer)
    data = SimpleNamespace(rows=3)
    objective._context = SimpleNamespace(whole=WholeModel(None), collate=collate, steps=4, data=data)
    return asked


def test_after_a_rollback_the_same_prompts_are_answered_again(tmp_path):
    """The weights that have answered them are gone."""
    objective = objective_of(output=str(tmp_path))
    asked = answering(objective)
    for _ in range(2):
        objective.step_batches(None, [batch_of(2)], Processes())
    assert asked == [[2, 3]]
    objective.rolled_back()
    objective.step_batches(None, [batch_of(2)], Processes())
    assert asked == [[2, 3], [2, 3]]


def test_a_rollback_drops_answers_that_are_generated_ahead():
    """Functions have begun to score them."""
    objective = objective_of(generate_ahead=True)
    asked = answering(objective)
    objective._rollout.run(prompts(0), Processes(), prompts(2))
    objective.rolled_back()
    assert objective._rollout.run(prompts(4), Processes()).metrics["staleness"] == 0
    assert asked == [[0, 1], [2, 3], [4, 5]]


def test_no_answers_are_generated_ahead_of_a_checkpoint_of_an_epoch():
    """A run that resumes there generates them after it."""
    objective = objective_of(generate_ahead=True, checkpoint={"per_epoch": 1})
    answering(objective)
    objective._rows = SimpleNamespace(prompt=lambda number: number)
    # An epoch of three prompts has three steps.
    assert [bool(objective._upcoming(prompts(step * SIZE))) for step in range(3)] == [True, True, False]
