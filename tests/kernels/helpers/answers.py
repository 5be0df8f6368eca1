"""Answers of ragged lengths, and how two losses of their log-probabilities are compared."""

from typing import Any

import torch
from torch import Tensor

# Tokens of the chosen answers, then of the rejected ones: ragged, one-token answers, equal lengths.
LENGTHS = [1, 7, 4, 1, 6, 2, 1, 5, 3, 6]
WIDTH = 8


def answers(scale: float = 1.0, equal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens, those of the reference, and which tokens there are: each [10, 8]."""
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    log_probs, reference = (-scale * torch.rand(len(LENGTHS), WIDTH).square().where(mask, 0.0) for _ in "ab")
    return log_probs, log_probs.clone() if equal else reference, mask


def flat(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(the values of packed tokens, with some of no answer between; which answer they are of)."""
    sequences = torch.arange(len(mask))[:, None].where(mask, -1)
    return values.flatten(), sequences.flatten()


def close(ours: Tensor, theirs: Tensor, least: float = 0.0) -> None:
    """Equal to 1e-5 of the largest value, which counts as no less than `least`."""
    assert ours.dtype == theirs.dtype
    scale = max(float(theirs.detach().abs().max()), least)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)


def both(ours: Any, theirs: Any, leaf: Tensor) -> None:
    """Value and gradient of two functions of the same leaf."""
    found = []
    for function in (ours, theirs):
        x = leaf.detach().clone().requires_grad_()
        loss = function(x)
        found.append((loss, torch.autograd.grad(loss, x)[0]))
    (value, gradient), (expected, expected_gradient) = found
    # A sum of terms about one may cancel to any value.
    close(value, expected, least=1.0)
    close(gradient, expected_gradient)
    assert gradient.isfinite().all()
