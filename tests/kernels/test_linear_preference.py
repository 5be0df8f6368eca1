"""linear_preference, linear_kto and linear_grpo against TRL's functions on PyTorch's log-probabilities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import linear_grpo, linear_kto, linear_preference
from strata_kernels.policy import PolicyLoss
from strata_kernels.preference import PairLoss
from tests.kernels.helpers.answers import LENGTHS, WIDTH

trl_losses = pytest.importorskip("tests.kernels.helpers.trl_losses", reason="TRL is not installed")
ANSWERS, HIDDEN, CLASSES = len(LENGTHS), 12, 37
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture
def problem(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of ragged answers [10, 8, 12], a head, and targets that are ignored beyond the answers."""
    x, weight = torch.randn(ANSWERS, WIDTH, HIDDEN), torch.randn(CLASSES, HIDDEN) * HIDDEN**-0.5
    target = torch.randint(CLASSES, (ANSWERS, WIDTH)).where(MASK, -100)
    return x.to(device), weight.to(device), target.to(device)


def log_probs(x: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    log_p = (functional.linear(x, weight) / temperature).log_softmax(-1)
    return log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0].where(target >= 0, 0.0)


def both(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Losses and gradients equal to 1e-5 of their largest value; a loss may cancel."""
    found = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        loss = function(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        scale = max(float(b.abs().max()), 1.0 if i == 0 else 0.0)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("loss", [*PairLoss.__args__, "cpo", "simpo", "orpo"])
def test_pairs_equal_trl(loss, problem) -> None:
    x, weight, target = problem
    mask, tokens = target >= 0, (target >= 0).sum(1)
    reference = (3 * torch.rand(ANSWERS, WIDTH) - 5).to(x).where(mask, 0.0)
    smoothing = 0.1 if loss in ("robust", "exo_pair") else 0.0
    options = {"loss": loss, "beta": 0.3, "label_smoothing": smoothing}
    free = loss in ("cpo", "simpo", "orpo")

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        terms = linear_preference(x, weight, target, None if free else reference.sum(1), **options)
        torch.testing.assert_close(torch.cat(terms[1:]), log_probs(x, weight, target).sum(1).detach())
        return terms.loss

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        found = log_probs(x, weight, target)
        if not free:
            return trl_losses.dpo(found, reference, mask, **options, discopop_tau=0.05)
        chosen, rejected = (found.sum(1) / (tokens if loss != "cpo" else 1)).chunk(2)
        # The mean over pairs, each per token.
        nll = -(found.sum(1) / tokens).chunk(2)[0].mean()
        if loss == "orpo":
            return nll - trl_losses.orpo(chosen, rejected, beta=0.3).mean()
        if loss == "cpo":
            return nll + trl_losses.cpo(chosen, rejected, loss="sigmoid", beta=0.3, label_smoothing=0.0).mean()
        return trl_losses.cpo(chosen, rejected, loss="simpo", beta=0.3, label_smoothing=0.0, gamma=1.0).mean()

    both(ours, theirs, (x, weight))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_single_answers_equal_trl(loss, problem) -> None:
    x, weight, target = problem
    mask = target >= 0
    reference = (3 * torch.rand(ANSWERS, WIDTH) - 5).to(x).where(mask, 0.0)
    desirable = torch.arange(ANSWERS, device=x.device) % 3 > 0
    others = torch.rand(ANSWERS, device=x.device)
    options = {"loss": loss, "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    both(
        lambda x, w: linear_kto(x, w, target, reference.sum(1), desirable, others.mean(), **options).loss,
        lambda x, w: trl_losses.kto(
            log_probs(x, w, target), reference, mask, desirable, others, torch.zeros_like(others), **options
        ),
        (x, weight),
    )


@pytest.mark.parametrize("loss", PolicyLoss.__args__)
def test_policies_equal_trl(loss, problem) -> None:
    x, weight, target = problem
    mask, advantages = target >= 0, torch.randn(ANSWERS).to(x)
    old, reference, sampled = (
        (log_probs(x, weight, target, 0.9) + 0.5 * torch.randn(ANSWERS, WIDTH).to(x)).where(mask, 0.0) for _ in range(3)
    )
    engine = (old - sampled).exp().clamp(max=2.0)
    form = {"loss": loss, "beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.28}
    form |= {} if loss in ("cispo", "sapo") else {"delta": 1.5}
    given = {"old_log_probs": old, "reference_log_probs": reference, "importance_weights": engine}
    items = torch.tensor(70.0, device=x.device) if loss in ("dapo", "cispo") else None

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        terms = linear_grpo(
            x, weight, target, advantages, **form, **given, temperature=0.9, total_tokens=items, max_tokens=8
        )
        assert not terms.clipped[~mask].any() and not terms.kl[~mask].any() and (terms.kl >= 0).all()
        return terms.loss

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        rest: dict[str, Any] = {"delta": None, "sapo_temperatures": (1.0, 1.05), "max_tokens": 8, **form}
        found = log_probs(x, weight, target, 0.9)
        return trl_losses.grpo(found, mask, advantages, old, reference, engine, items, **rest)

    both(ours, theirs, (x, weight))


def test_accumulation_does_not_change_the_sum(problem) -> None:
    """Pairs in micro-batches of two and three, and answers of three and seven."""
    x, weight, target = problem
    reference, advantages = torch.full((ANSWERS,), -9.0).to(x), torch.randn(ANSWERS).to(x)
    # Pairs: the chosen answers are the first half.
    rows = [torch.tensor([0, 1, 5, 6]), torch.tensor([2, 3, 4, 7, 8, 9])]
    pairs = lambda i: linear_preference(x[i], weight, target[i], reference[i], num_items=5).loss  # noqa: E731
    torch.testing.assert_close(pairs(rows[0]) + pairs(rows[1]), pairs(torch.arange(ANSWERS)))
    totals = {"total_sequences": ANSWERS, "total_tokens": int((target >= 0).sum())}
    for loss in ("grpo", "dapo"):
        answers = lambda i, k=loss: linear_grpo(x[i], weight, target[i], advantages[i], loss=k, **totals).loss  # noqa: E731
        torch.testing.assert_close(answers(slice(3)) + answers(slice(3, None)), answers(slice(None)))


def test_compiled_equals_eager(problem, gradients) -> None:
    x, weight, target = problem
    reference, advantages = torch.full((ANSWERS,), -9.0).to(x), torch.randn(ANSWERS).to(x)
    for function in (
        lambda x, w: linear_preference(x.sin(), w, target, reference, loss="apo_zero").loss,
        lambda x, w: linear_grpo(x.sin(), w, target, advantages, loss="gspo", temperature=0.8).loss,
    ):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for a, b in zip(gradients(function, [x, weight]), gradients(compiled, [x, weight]), strict=True):
            torch.testing.assert_close(a, b)


def test_wrong_arguments(problem) -> None:
    x, weight, target = problem
    reference, desirable = torch.zeros(ANSWERS).to(x), torch.ones(ANSWERS, device=x.device)
    for call, message in (
        (lambda: linear_preference(x[:9], weight, target[:9], reference[:9]), "as many rejected ones"),
        (lambda: linear_preference(x, weight, target), "'sigmoid' needs reference"),
        (lambda: linear_preference(x, weight, target, reference, loss="orpo"), "'orpo' has no reference"),
        (lambda: linear_preference(x, weight, target, reference, loss="ppo"), "must be one of"),
        (lambda: linear_preference(x, weight, target, reference[:5]), "one sum per answer"),
        (lambda: linear_preference(x[0], weight, target[0], reference), r"\[B, T, H\]"),
        (lambda: linear_kto(x, weight, target, reference, desirable, reference.sum()), "must be bool"),
        (lambda: linear_grpo(x, weight, target, reference[:5]), r"\[B, T\] and \[B\]"),
        (lambda: linear_grpo(x, weight, target, reference, old_log_probs=reference), "the shape of target"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
