"""Losses of preference optimization against TRL's own functions and against the papers' formulas in fp64."""

import math

import pytest
import torch
from torch import Tensor

from strata_kernels.preference import (
    PairLoss,
    cpo_losses,
    dpo_losses,
    kto_kl,
    kto_losses,
    orpo_losses,
    sequence_sums,
    simpo_losses,
)
from tests.kernels.helpers.answers import LENGTHS, answers, both, flat

trl_losses = pytest.importorskip("tests.kernels.helpers.trl_losses", reason="TRL is not installed")
PAIR_LOSSES = PairLoss.__args__
SMOOTHED = {"robust", "exo_pair"}


@pytest.mark.parametrize("equal", [False, True], ids=["ratios", "equal to the reference"])
# Sums from ratios about 0.01 to about 100, and of an answer that is all but impossible.
@pytest.mark.parametrize("scale", [1.0, 4.6, 50.0])
@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_pairs_equal_trl(loss, scale, equal) -> None:
    log_probs, reference, mask = answers(scale, equal)
    options = {"loss": loss, "beta": 0.1, "label_smoothing": 0.1 if loss in SMOOTHED else 0.0, "discopop_tau": 0.05}

    def ours(x: Tensor) -> Tensor:
        (values, sequences), (theirs, _) = flat(x, mask), flat(reference, mask)
        own, other = (sequence_sums(v, sequences, len(LENGTHS)).chunk(2) for v in (values, theirs))
        tokens = mask.sum(1).chunk(2)
        return dpo_losses(*own, *other, **options, chosen_tokens=tokens[0], rejected_tokens=tokens[1]).mean()

    both(ours, lambda x: trl_losses.dpo(x, reference, mask, **options), log_probs)


def test_label_smoothing_of_sigmoid_is_that_of_conservative_dpo() -> None:
    x = [torch.randn(6, dtype=torch.float64) for _ in range(4)]
    delta = 0.3 * (x[0] - x[2] - x[1] + x[3])
    expected = -0.8 * delta.sigmoid().log() - 0.2 * (-delta).sigmoid().log()
    torch.testing.assert_close(dpo_losses(*x, beta=0.3, label_smoothing=0.2), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "simpo"])
def test_pairs_without_a_reference_equal_trl(loss, smoothing) -> None:
    if smoothing and loss in ("hinge", "ipo"):
        pytest.skip("has no label smoothing")
    log_probs, _, mask = answers(4.6)
    tokens = mask.sum(1).chunk(2)

    def ours(x: Tensor) -> Tensor:
        chosen, rejected = x.sum(1).chunk(2)
        if loss == "simpo":
            return simpo_losses(chosen, rejected, *tokens, beta=2.0, gamma=1.0, label_smoothing=smoothing).mean()
        options = {"loss": loss, "beta": 0.2, "label_smoothing": smoothing}
        return cpo_losses(chosen, rejected, **options, chosen_tokens=tokens[0], rejected_tokens=tokens[1]).mean()

    def theirs(x: Tensor) -> Tensor:
        average = loss in ("ipo", "simpo")
        chosen, rejected = (x.sum(1) / (mask.sum(1) if average else 1)).chunk(2)
        options = {"beta": 2.0, "gamma": 1.0} if loss == "simpo" else {"beta": 0.2}
        return trl_losses.cpo(chosen, rejected, loss=loss, label_smoothing=smoothing, **options).mean()

    both(ours, theirs, log_probs)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_orpo_equals_trl(scale) -> None:
    log_probs, _, mask = answers(scale)
    tokens = mask.sum(1).chunk(2)

    def theirs(x: Tensor) -> Tensor:
        return -trl_losses.orpo(*(x.sum(1) / mask.sum(1)).chunk(2), beta=0.3).mean()

    both(lambda x: orpo_losses(*x.sum(1).chunk(2), *tokens, beta=0.3).mean(), theirs, log_probs)


def test_orpo_of_answers_that_are_certain() -> None:
    """TRL's is NaN there: an answer of one token whose probability rounds to 1."""
    certain, unsure = torch.zeros(2, requires_grad=True), torch.full((2,), -0.5, requires_grad=True)
    tokens = torch.ones(2)
    for pair in ((certain, unsure), (unsure, certain), (certain, certain)):
        loss = orpo_losses(*pair, tokens, tokens).sum()
        assert loss.isfinite()
        assert all(g is None or g.isfinite().all() for g in torch.autograd.grad(loss, pair, allow_unused=True))


@pytest.mark.parametrize("desirable", [[1, 0, 1, 1, 0, 1, 0, 0, 1, 0], [1] * 10, [0] * 10], ids=["both", "all", "none"])
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_equals_trl(loss, desirable) -> None:
    log_probs, reference, mask = answers(4.6)
    wanted = torch.tensor(desirable).bool()
    others, other_reference = -5 * torch.rand(10), -6 * torch.rand(10)
    options = {"loss": loss, "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.0}

    def ours(x: Tensor) -> Tensor:
        kl = kto_kl(others, other_reference)
        return kto_losses(x.where(mask, 0.0).sum(1), reference.sum(1), wanted, kl, **options).mean()

    def theirs(x: Tensor) -> Tensor:
        return trl_losses.kto(x, reference, mask, wanted, others, other_reference, **options)

    both(ours, theirs, log_probs)


def test_the_divergence_of_kto_is_not_negative_and_has_no_gradient() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert kto_kl(x - 1, torch.zeros(3)) == 0 and not kto_kl(x + 1, torch.zeros(3)).requires_grad


def test_sums_of_sequences() -> None:
    values = torch.randn(50, dtype=torch.float64, requires_grad=True)
    sequences = torch.randint(-1, 7, (50,))
    values.data[sequences == -1] = math.nan
    sums = sequence_sums(values, sequences, 9)
    kept = sequences >= 0
    expected = torch.zeros(9, dtype=torch.float64).index_add(0, sequences[kept], values.detach()[kept])
    torch.testing.assert_close(sums, expected)
    weights = torch.arange(9.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(sums @ weights, values)
    torch.testing.assert_close(gradient, weights[sequences].where(kept, 0.0))


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_compiled_equals_eager(loss) -> None:
    x = [torch.randn(4) for _ in range(4)]
    smoothing, tokens = 0.1 if loss in SMOOTHED else 0.0, torch.tensor([1, 2, 3, 4])

    def function(*x: Tensor) -> Tensor:
        return dpo_losses(*x, loss=loss, label_smoothing=smoothing, chosen_tokens=tokens, rejected_tokens=tokens)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*x), function(*x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dpo"}, "one of sigmoid"),
        ({"beta": 0.0}, "beta 0.0 must be positive"),
        ({"loss": "ipo"}, "pass chosen_tokens"),
        ({"loss": "exo_pair"}, "positive label_smoothing"),
        ({"loss": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "not for hinge"),
        ({"loss": "discopop", "discopop_tau": 0.0}, "discopop_tau"),
    ],
    ids=str,
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_losses(*(torch.zeros(2) for _ in range(4)), **options)
