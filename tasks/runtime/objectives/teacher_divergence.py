"""Cross entropy of the labels, and the divergence from a teacher.

    z, t = logits of student and teacher         p, q = softmax(z / T), softmax(t / T)         m = (1 - β) p + β q
    forward_kl = Σ q log(q / p)      reverse_kl = Σ p log(p / q)      jsd = β Σ q log(q / m) + (1 - β) Σ p log(p / m)
    loss = (1 - w) cross entropy(z, label) + w T² divergence

T² keeps the gradient of the divergence as large as at temperature 1. Sources: Hinton et al. (arXiv:1503.02531), Agarwal
et al. (arXiv:2306.13649).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from strata_kernels import linear_cross_entropy, linear_distillation, linear_jsd, linear_topk_kl_div
from strata_platform.spec.sections.objectives import Distill as Settings
from tasks.runtime.data.dataset import IGNORE_INDEX
from tasks.runtime.objectives.head_sums import Head, head_sums


class Shares(NamedTuple):
    """Sums over the rows with a label, divided by the items of a step; only `loss` has a gradient."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def distillation(
    x: Tensor,
    head: Head,
    labels: Tensor,
    teacher_x: Tensor,
    teacher: Head,
    settings: Settings,
    items: Tensor,
    max_targets: int | None = None,
    *,
    labelled: bool = True,
) -> Shares:
    """Shares of the rows x [B, T, H] with labels [B, T] and teacher_x [B, T, H']; label -100 skips a row.

    Vocabularies may be padded to different sizes: the divergence covers the tokens that both have. x and the head get
    gradients. Where both have a head, neither's logits are there as a whole; otherwise rows are computed in chunks by
    plain PyTorch.

    max_targets: upper bound of the rows with a label, if known; the head skips the others. labelled: whether the cross
    entropy is wanted. Heads do not compute it otherwise, and the divergence has to be the whole loss.
    """
    assert labelled or settings.weight == 1
    if head.weight is not None and teacher.weight is not None:
        return _of_heads(x, head, labels, teacher_x, teacher, settings, items, max_targets, labelled)
    labels, x, teacher_x = labels.flatten(), x.flatten(0, 1), teacher_x.flatten(0, 1)
    # Rows with a label first, in order; the others add nothing.
    kept = (labels == IGNORE_INDEX).to(torch.uint8).argsort(stable=True)[:max_targets]
    labels, teacher_x = labels[kept], teacher_x[kept]

    def sums_of(logits: Tensor, part: slice) -> Tensor:
        return _of_logits(logits, teacher.logits(teacher_x[part]), labels[part], settings) / items

    return Shares(*head_sums(x[kept], head, sums_of))


def top_tokens_distillation(
    x: Tensor,
    head: Head,
    labels: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    settings: Settings,
    items: Tensor,
    max_targets: int | None = None,
) -> Shares:
    """As `distillation`, from the likeliest tokens [B, T, K] of a teacher and their log-probabilities at temperature 1.

    q is the distribution over these tokens that has their log-probabilities, divided by the temperature, as logits. A
    log-probability of -inf leaves a token out.
    """
    log_q = (log_probs / settings.temperature).log_softmax(-1)
    if head.weight is not None:
        entropy = label_share(x, head, labels, settings, items, max_targets)
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.weight > 0):
            divergence = linear_topk_kl_div(
                x,
                head.weight,
                tokens,
                log_q,
                labels,
                temperature=settings.temperature,
                bias=head.bias,
                softcap=head.softcap,
                num_items=items,
                max_targets=max_targets,
            )
        return combined(entropy, divergence, settings)
    labels, tokens, log_q = labels.flatten(), tokens.flatten(0, 1), log_q.flatten(0, 1)

    def sums_of(logits: Tensor, part: slice) -> Tensor:
        log_p = log_softmax(logits / settings.temperature, dim=-1).gather(1, tokens[part])
        # A place that is empty has probability 0.
        terms = log_q[part].exp() * (log_q[part] - log_p).masked_fill(log_q[part].isneginf(), 0.0)
        return _sums(logits, terms, labels[part], settings) / items

    return Shares(*head_sums(x.flatten(0, 1), head, sums_of))


def combined(entropy: Tensor, divergence: Tensor, settings: Settings) -> Shares:
    """The loss of both parts."""
    weight = settings.weight
    loss = (1 - weight) * entropy + weight * settings.temperature**2 * divergence
    return Shares(loss, entropy.detach().to(loss.dtype), divergence.detach())


def label_share(
    x: Tensor, head: Head, labels: Tensor, settings: Settings, items: Tensor, max_targets: int | None = None
) -> Tensor:
    """Cross entropy of a head over the items; without a gradient where the loss has no place for it."""
    assert head.weight is not None
    with torch.set_grad_enabled(torch.is_grad_enabled() and settings.weight < 1):
        return linear_cross_entropy(
            x, head.weight, labels, bias=head.bias, softcap=head.softcap, num_items=items, max_targets=max_targets
        )


def _of_heads(
    x: Tensor,
    head: Head,
    labels: Tensor,
    teacher_x: Tensor,
    teacher: Head,
    settings: Settings,
    items: Tensor,
    max_targets: int | None,
    labelled: bool,
) -> Shares:
    """As `distillation`, from one pass over the logits of both heads."""
    assert head.weight is not None and teacher.weight is not None
    factor = settings.weight * settings.temperature**2
    inputs = [x, head.weight, teacher_x.to(x.dtype), teacher.weight.to(head.weight.dtype), labels]
    bias, teacher_bias = head.bias, None if teacher.bias is None else teacher.bias.to(head.weight.dtype)
    options: dict[str, Any] = {
        "beta": _beta(settings), "temperature": settings.temperature,
        "softcap": head.softcap, "teacher_softcap": teacher.softcap, "num_items": items, "max_targets": max_targets,
    }  # fmt: skip
    if labelled:
        terms = linear_distillation(
            *inputs, label_weight=1 - settings.weight, divergence_weight=factor,
            bias=bias, teacher_bias=teacher_bias, **options,
        )  # fmt: skip
        return Shares(*terms)
    common = min(head.weight.shape[0], teacher.weight.shape[0])
    inputs[1], inputs[3] = inputs[1][:common], inputs[3][:common]
    biases = {"bias": bias, "teacher_bias": teacher_bias}
    options |= {name: None if value is None else value[:common] for name, value in biases.items()}
    divergence = linear_jsd(*inputs, **options)
    return Shares(factor * divergence, torch.zeros_like(items), divergence.detach())


def _beta(settings: Settings) -> float:
    """The place of the divergence between both directions of the Kullback-Leibler divergence."""
    between = 0.5 if settings.beta is None else settings.beta
    return {"forward_kl": 0.0, "reverse_kl": 1.0}.get(settings.divergence, between)


def _of_logits(z: Tensor, t: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Loss, cross entropy and divergence, summed over the rows with a label: [3]."""
    common = min(z.shape[1], t.shape[1])
    log_p, log_q = (log_softmax(logits[:, :common] / settings.temperature, dim=-1) for logits in (z, t))
    beta = _beta(settings)
    if beta in (0, 1):
        terms = _kl(log_p, log_q) if beta else _kl(log_q, log_p)
    else:
        over_p, over_q = _over_mixture(log_p, log_q, beta)
        terms = beta * log_q.exp() * over_q + (1 - beta) * log_p.exp() * over_p
    return _sums(z, terms, labels, settings)


def _sums(z: Tensor, terms: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """As `_of_logits`, with the terms of the divergence of each row."""
    entropy = cross_entropy(z, labels, reduction="sum")
    divergence = terms.sum(dim=-1).where(labels != IGNORE_INDEX, 0.0).sum()
    loss = (1 - settings.weight) * entropy + settings.weight * settings.temperature**2 * divergence
    return torch.stack([loss, entropy, divergence])


def _over_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m), with the larger of p and q in front: where they are close, nothing cancels."""
    difference = log_q - log_p
    larger = difference > 0
    share = torch.where(larger, 1 - beta, beta).to(log_p.dtype)
    log_m = torch.log1p(share * torch.expm1(torch.where(larger, -difference, difference)))
    return -difference.where(larger, 0.0) - log_m, difference.masked_fill(larger, 0.0) - log_m


def _kl(of: Tensor, given: Tensor) -> Tensor:
    """Terms of KL(of || given) from log-probabilities."""
    return kl_div(given, of, reduction="none", log_target=True)
