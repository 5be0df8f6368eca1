"""Losses of policy optimization against TRL's own function."""

import pytest
import torch
from torch import Tensor

from strata_kernels.policy import (
    PolicyLoss,
    group_advantages,
    policy_losses,
    policy_weights,
    truncated_importance_weights,
)
from tests.kernels.helpers.answers import LENGTHS, answers, both, close, flat

trl_losses = pytest.importorskip("tests.kernels.helpers.trl_losses", reason="TRL is not installed")
LOSSES = PolicyLoss.__args__
DEFAULTS = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None, "sapo_temperatures": (1.0, 1.05)}
OPTIONS = {
    "plain": {},
    "reference": {"beta": 0.04},
    "two-sided": {"delta": 1.5},
    "engine": {"beta": 0.1},
}


def advantages(name: str) -> Tensor:
    return torch.zeros(len(LENGTHS)) if name == "equal rewards" else torch.randn(len(LENGTHS))


@pytest.mark.parametrize("rewards", ["differing rewards", "equal rewards"])
# Ratios of tokens up to 100, and down to 0.01.
@pytest.mark.parametrize("scale", [0.3, 4.6])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_trl(loss, options, scale, rewards) -> None:
    if options == "two-sided" and loss in ("cispo", "sapo"):
        pytest.skip("has no delta")
    log_probs, old, mask = answers(scale)
    reference, advantage = answers(scale)[0], advantages(rewards)
    given = {**DEFAULTS, **OPTIONS[options], "loss": loss}
    _, sequences = flat(log_probs, mask)
    weights = None
    if options == "engine":
        weights = truncated_importance_weights(
            old.flatten(), reference.flatten(), sequences, len(LENGTHS), most=2.0
        )  # fmt: skip
        expected = (old - reference).exp().clamp(max=2.0).flatten()
        close(weights, expected.where(mask.flatten(), 1.0))
    items, most = torch.tensor(70.0), 8

    def ours(x: Tensor) -> Tensor:
        terms = policy_losses(
            x.flatten(), advantage, sequences, **given, old_log_probs=old.flatten(),
            reference_log_probs=reference.flatten() if given["beta"] else None, importance_weights=weights,
        )  # fmt: skip
        tokens = items if loss in ("dapo", "cispo") else None
        return (terms.loss * policy_weights(
            sequences, len(LENGTHS), loss=loss, total_tokens=tokens, max_tokens=most
        )).sum()  # fmt: skip

    def theirs(x: Tensor) -> Tensor:
        engine = None if weights is None else weights.view(mask.shape)
        return trl_losses.grpo(
            x, mask, advantage, old, reference if given["beta"] else None, engine, items, **given, max_tokens=most
        )

    both(ours, theirs, log_probs)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_an_older_policy_the_ratio_is_one_and_has_a_gradient(loss) -> None:
    log_probs, _, mask = answers()
    advantage = torch.randn(len(LENGTHS))
    _, sequences = flat(log_probs, mask)

    def ours(x: Tensor) -> Tensor:
        terms = policy_losses(x.flatten(), advantage, sequences, loss=loss)
        return (terms.loss * policy_weights(sequences, len(LENGTHS), loss=loss, max_tokens=8)).sum()

    def theirs(x: Tensor) -> Tensor:
        given = {**DEFAULTS, "epsilon_high": 0.2, "loss": loss}
        items = mask.sum()
        return trl_losses.grpo(x, mask, advantage, None, None, None, items, **given, max_tokens=8)

    both(ours, theirs, log_probs)


@pytest.mark.parametrize("loss", LOSSES)
def test_accumulation_does_not_change_the_sum(loss) -> None:
    """Micro-batches of three and seven answers, with the totals of the step."""
    log_probs, old, mask = answers(4.6)
    advantage = torch.randn(len(LENGTHS))

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        x = log_probs[rows].flatten().requires_grad_()
        _, sequences = flat(log_probs[rows], mask[rows])
        terms = policy_losses(x, advantage[rows], sequences, loss=loss, old_log_probs=old[rows].flatten())
        totals = {"total_sequences": len(LENGTHS), "total_tokens": mask.sum(), "max_tokens": 8}
        weights = policy_weights(sequences, len(mask[rows]), loss=loss, **totals)
        value = (terms.loss * weights).sum()
        return value.detach(), torch.autograd.grad(value, x)[0]

    parts, whole = [run(slice(0, 3)), run(slice(3, None))], run(slice(None))
    close(parts[0][0] + parts[1][0], whole[0])
    close(torch.cat([part[1] for part in parts]), whole[1])


def test_what_belongs_to_no_answer_may_be_anything() -> None:
    log_probs, old, mask = answers()
    values, sequences = flat(log_probs.where(mask, torch.nan), mask)
    x = values.requires_grad_()
    for loss in LOSSES:
        terms = policy_losses(
            x, torch.randn(len(LENGTHS)), sequences, loss=loss, old_log_probs=old.flatten(),
            reference_log_probs=old.flatten(), beta=0.1,
            importance_weights=torch.full_like(x, 2.0).where(mask.flatten(), torch.nan),
        )  # fmt: skip
        loss_sum = (terms.loss * policy_weights(sequences, len(LENGTHS), loss=loss, max_tokens=8)).sum()
        (gradient,) = torch.autograd.grad(loss_sum, x)
        assert loss_sum.isfinite() and not gradient[~mask.flatten()].any() and gradient.isfinite().all()


def test_importance_weights_of_answers_are_products_of_their_tokens() -> None:
    log_probs, sampled, mask = answers(2.0)
    sampled[0, 0] = torch.nan
    values, sequences = flat(log_probs, mask)
    found = truncated_importance_weights(values, sampled.flatten(), sequences, 10, most=3.0, level="sequence")
    difference = (log_probs - sampled).nan_to_num(0.0).where(mask, 0.0)
    expected = difference.sum(1, keepdim=True).exp().clamp(max=3.0).expand_as(mask)
    close(found[mask.flatten()], expected[mask])


def test_shares_that_are_clipped() -> None:
    ratio, advantage = torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    terms = policy_losses(ratio.log(), advantage, torch.arange(5), old_log_probs=torch.zeros(5))
    assert terms.clipped.tolist() == [0, 1, 0, 1, 0]


def test_advantages_of_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.1])
    groups = rewards.view(2, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    found = group_advantages(rewards, 4)
    close(found[:4], expected[0])
    assert not found[4:].any()
    assert not group_advantages(rewards, 1).any() and not group_advantages(rewards[:1], 1, scale="batch").any()
    close(group_advantages(rewards, 4, scale="none"), (groups - groups.mean(1, keepdim=True)).flatten())
    close(
        group_advantages(rewards, 4, scale="batch")[:4],
        (groups - groups.mean(1, keepdim=True))[0] / (rewards.std() + 1e-4),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppo"}, "one of grpo"),
        ({"beta": 0.1}, "pass reference_log_probs"),
        ({"delta": 1.1}, r"at least 1 \+ epsilon_high"),
        ({"delta": 2.0, "loss": "sapo"}, "not for cispo or sapo"),
    ],
    ids=str,
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        policy_losses(torch.zeros(2), torch.zeros(2), torch.arange(2), **options)
    with pytest.raises(ValueError, match="divides by max_tokens"):
        policy_weights(torch.arange(2), 2, loss="dr_grpo")
    with pytest.raises(ValueError, match="cannot be divided into groups"):
        group_advantages(torch.zeros(3), 2)
