"""Cross entropy and a divergence from a teacher, in chunks of rows; see `head_sums`.

    z, t = logits of student and teacher         p, q = softmax(z / T), softmax(t / T)         m = (p + q) / 2
    forward_kl = Σ q log(q / p)      reverse_kl = Σ p log(p / q)      jsd = (Σ p log(p / m) + Σ q log(q / m)) / 2
    loss = (1 - w) cross entropy(z, label) + w T² divergence

T² keeps the gradient of the divergence as large as at temperature 1. Sources: Hinton et al. (arXiv:1503.02531), Agarwal
et al. (arXiv:2306.13649).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from strata_platform.spec.objectives import Distill as Settings
from tasks.runtime.objectives.head_sums import Head, head_sums


class Sums(NamedTuple):
    """Sums over the rows with a label, divided by `items`; only `loss` has a gradient."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def distillation(
    x: Tensor, head: Head, labels: Tensor, teacher_x: Tensor, teacher: Head, settings: Settings, items: Tensor
) -> Sums:
    """Sums over the rows of x [N, H], labels [N] and teacher_x [N, H'], divided by `items`; label -100 skips a row.

    Vocabularies may be padded to different sizes: the divergence covers the tokens that both have. x and the head get
    gradients.
    """

    def sums_of(logits: Tensor, part: slice) -> Tensor:
        return _losses(logits, teacher.logits(teacher_x[part]), labels[part], settings) / items

    return Sums(*head_sums(x, head, sums_of))


def _losses(z: Tensor, t: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Loss, cross entropy and divergence, summed over the rows with a label: [3]."""
    learned = labels != -100
    entropy = cross_entropy(z, labels, reduction="sum")
    common = min(z.shape[1], t.shape[1])
    p, q = (log_softmax(logits[:, :common] / settings.temperature, dim=-1) for logits in (z, t))
    divergence = _DIVERGENCES[settings.divergence](p, q).sum(dim=-1).where(learned, 0.0).sum()
    loss = (1 - settings.weight) * entropy + settings.weight * settings.temperature**2 * divergence
    return torch.stack([loss, entropy, divergence])


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Terms of KL(a || b) from log-probabilities."""
    return a.exp() * (a - b)


def _jsd(p: Tensor, q: Tensor) -> Tensor:
    m = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, m) + _kl(q, m)) / 2


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda p, q: _kl(q, p),
    "reverse_kl": _kl,
    "jsd": _jsd,
}
