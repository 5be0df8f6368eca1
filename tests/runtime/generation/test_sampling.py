"""Drawn tokens have the probabilities of the softmax, and are a function of logits and random number."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tasks.runtime.generation import Sampling
from tasks.runtime.generation.sampling import draw, uniform_numbers


def sampling(**options):
    return Sampling(max_new_tokens=1, **options)


@pytest.mark.parametrize("vocabulary", [1, 2, 10, 97, 1000])
def test_a_token_is_the_first_above_the_random_number(vocabulary):
    logits = 3 * torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0))
    uniform = uniform_numbers(0, range(64), 1)[:, 0]
    tokens, log_probs = draw(logits, uniform, sampling(temperature=0.7))
    exact = (logits.double() / 0.7).softmax(-1)
    assert tokens.tolist() == [int((row.cumsum(-1) > u).nonzero()[0]) for row, u in zip(exact, uniform, strict=True)]
    torch.testing.assert_close(log_probs.double(), exact.log().gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)


def test_frequencies_are_the_probabilities():
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    draws = 100_000
    tokens, _ = draw(logits.expand(draws, -1), uniform_numbers(3, [5], draws)[0], sampling())
    expected = logits.softmax(-1)[0]
    # Five standard deviations.
    bound = 5 * (expected * (1 - expected) / draws).sqrt()
    assert ((tokens.bincount(minlength=8) / draws - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"top_k": 5, "top_p": 0.6}, [TopKLogitsWarper(5), TopPLogitsWarper(0.6)]),
    ],
    ids=["top_k", "top_p", "both"],
)
def test_tokens_that_transformers_excludes_are_never_drawn(options, theirs):
    logits = 2 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    kept = logits
    for warper in theirs:
        kept = warper(None, kept)
    # With both ends of the interval.
    uniform = torch.cat([uniform_numbers(0, [0], 5000)[0], torch.tensor([0.0, 1 - 2**-53])])
    tokens, log_probs = draw(logits.expand(len(uniform), -1), uniform, sampling(**options))
    assert {*tokens.tolist()} == {*kept.isfinite().nonzero()[:, 1].tolist()}
    # Under the distribution that nothing was removed from.
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[0, tokens])


def test_temperature_0_takes_the_likeliest():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = draw(logits, torch.zeros(4, dtype=torch.float64), sampling(temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1))


def test_streams_of_numbers_depend_on_seed_and_key_alone():
    numbers = uniform_numbers(0, [7, 8, 2**63 + 1], 100)
    assert torch.equal(numbers[1:2], uniform_numbers(0, [8], 100))
    assert torch.equal(numbers[:, :10], uniform_numbers(0, [7, 8, 2**63 + 1], 10))
    other = uniform_numbers(1, [7, 8, 2**63 + 1], 100)
    assert len({*numbers.flatten().tolist(), *other.flatten().tolist()}) == 600
