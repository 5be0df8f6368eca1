"""Losses of policy optimization (GRPO and variants) as functions of tokens' log-probabilities, in plain PyTorch.

As in `preference`, inputs are small tensors, and losses are per token, not reduced; `policy_weights` computes the
weights of a reduction. With R = exp(log p - log p_old) of a token, A its answer's advantage, u = min(R, delta), and s
the logistic function:

    grpo, bnpo, dr_grpo, dapo    -min(u A, clip(R, 1 - ε_low, 1 + ε_high) A)                  arXiv:2402.03300
    gspo                         the same with the R of the whole answer,
                                 exp(mean over its tokens of log p - log p_old)               arXiv:2507.18071
    cispo                        -sg(min(R, ε_high)) A log p, sg = stop gradient              arXiv:2506.13585
    sapo                         -(4 / τ) s(τ (R - 1)) A, τ by the sign of A                  arXiv:2511.20347

each times the token's truncated importance weight, plus β kl with kl = q - log q - 1, q = p_reference / p. The first
four differ only in `policy_weights`:

    grpo, gspo, sapo    mean over the tokens of an answer, then over answers
    bnpo, dapo, cispo   mean over tokens: those of this batch, or of the whole step by `total_tokens`
    dr_grpo             sum over tokens, over answers times `max_tokens`                      arXiv:2503.20783
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ._checks import require_known, require_positive
from .preference import sequence_sums

PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"]
RewardScale = Literal["group", "batch", "none"]


class PolicyTerms(NamedTuple):
    """Terms of tokens, each [N]; 0 for tokens outside answers.

    loss: differentiable, including the KL term.
    kl: estimate of the KL divergence from the reference model, without gradient; zeros without one.
    clipped: 1 where the ratio is out of bounds and clipping zeroes the gradient, without gradient.
    """

    loss: Tensor
    kl: Tensor
    clipped: Tensor


def policy_losses(
    log_probs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    loss: PolicyLoss = "grpo",
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> PolicyTerms:
    """The unweighted loss of each token, by a formula of this module's docstring.

    Args:
        log_probs: [N], fp32 or fp64, of the tokens.
        advantages: [S], of the answers.
        sequences: [N], int64: which answer a token belongs to, -1 for none.
        loss: the formula.
        old_log_probs: [N], of the policy in the denominator of the ratio; default: `log_probs.detach()`.
        reference_log_probs: [N], of the reference model; required if β is not 0.
        importance_weights: [N], e.g. from `truncated_importance_weights`.
        beta: β, factor of the KL term.
        epsilon_low, epsilon_high: bounds of the ratio; for cispo, epsilon_high is the ratio's upper bound itself.
        delta: upper bound of the ratio for negative advantages too, at least 1 + ε_high; None for none.
        sapo_temperatures: τ of sapo for positive advantages, and for the others.

    Raises:
        ValueError: an invalid option.
    """
    _check(loss, beta, epsilon_high, delta, reference_log_probs)
    answered = sequences >= 0
    index = sequences.clamp(min=0)
    n_sequences = advantages.shape[0]
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    # Tokens outside answers: zero loss, and a NaN in them must not propagate to gradients.
    log_ratio = (log_probs - old).where(answered, 0.0)
    if loss == "gspo":
        tokens = sequence_sums(answered.to(log_ratio.dtype), sequences, n_sequences).clamp(min=1)
        log_ratio = (sequence_sums(log_ratio, sequences, n_sequences) / tokens)[index]
    advantage = advantages.to(log_probs.dtype)[index]
    terms, clipped = _terms(loss, log_ratio, log_probs, advantage, epsilon_low, epsilon_high, delta, sapo_temperatures)
    if importance_weights is not None:
        terms = terms * importance_weights.where(answered, 1.0)
    kl = torch.zeros_like(terms)
    if reference_log_probs is not None:
        log_q = (reference_log_probs - log_probs).where(answered, 0.0)
        kl = log_q.exp() - log_q - 1
        terms = terms + beta * kl if beta else terms
    none = torch.zeros((), dtype=terms.dtype, device=terms.device)
    return PolicyTerms(
        terms.where(answered, none), kl.detach().where(answered, none), clipped.to(terms.dtype).where(answered, none)
    )


def _terms(
    loss: str, log_ratio: Tensor, log_probs: Tensor, advantage: Tensor, low: float, high: float, delta: float | None,
    temperatures: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the loss of each token before importance weights and KL, whether it is clipped)."""
    ratio = log_ratio.exp()
    if loss == "cispo":
        return -ratio.detach().clamp(max=high) * advantage * log_probs, (ratio > high) & (advantage > 0)
    if loss == "sapo":
        tau = torch.where(advantage > 0, temperatures[0], temperatures[1]).to(ratio.dtype)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage, torch.zeros_like(ratio)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    terms = -torch.minimum(bounded * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return terms, ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))


def policy_weights(
    sequences: Tensor,
    n_sequences: int,
    *,
    loss: PolicyLoss = "grpo",
    total_sequences: int | Tensor | None = None,
    total_tokens: int | Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """The weight of each token's loss, [N], fp32: the total loss is `(policy_losses(...).loss * weights).sum()`.

    Pass the totals of the whole step, over micro-batches and processes: then the micro-batches' losses add up to the
    loss of the step, independent of its partition.

    Args:
        sequences: [N], int64: which answer a token belongs to, -1 for none.
        n_sequences: S, number of answers in this batch.
        loss: as in `policy_losses`.
        total_sequences: number of answers of the step; default: of this batch.
        total_tokens: number of answer tokens of the step; default: of this batch.
        max_tokens: divisor of dr_grpo, the maximum number of tokens of an answer.

    Raises:
        ValueError: an invalid option.
    """
    require_known("loss", loss, get_args(PolicyLoss))
    answered = (sequences >= 0).float()
    answers = n_sequences if total_sequences is None else total_sequences
    if loss in ("grpo", "gspo", "sapo"):
        own = sequence_sums(answered, sequences, n_sequences)[sequences.clamp(min=0)]
        return answered / (own.clamp(min=1) * answers)
    if loss == "dr_grpo":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f"loss 'dr_grpo' divides by max_tokens, which must be positive, not {max_tokens}")
        return answered / (answers * max_tokens)
    tokens = answered.sum() if total_tokens is None else total_tokens
    return answered / (tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1))


def truncated_importance_weights(
    log_probs: Tensor, sampling_log_probs: Tensor, sequences: Tensor, n_sequences: int,
    *, most: float, level: Literal["token", "sequence"] = "token",
) -> Tensor:  # fmt: skip
    """min(p / p_sampling, most), without gradient: [N].

    They correct for an inference engine that samples with log-probabilities other than the trainer's.

    Args:
        log_probs, sampling_log_probs: [N], of the trainer and of the engine. NaN, for a token that the engine could
            not score, counts as equal.
        sequences, n_sequences: as in `policy_weights`.
        most: upper bound, positive.
        level: ratio of the token, or product of the ratios over its answer.
    """
    require_known("level", level, ("token", "sequence"))
    require_positive("most", most)
    difference = (log_probs - sampling_log_probs).detach().nan_to_num(nan=0.0).where(sequences >= 0, 0.0)
    if level == "sequence":
        difference = sequence_sums(difference, sequences, n_sequences)[sequences.clamp(min=0)]
    return difference.exp().clamp(max=most)


def group_advantages(rewards: Tensor, group_size: int, *, scale: RewardScale = "group") -> Tensor:
    """(reward - mean of its group) / (standard deviation + 1e-4), [S]; zeros where all rewards of a group are equal.

    Args:
        rewards: [S], in groups of `group_size` consecutive answers to one prompt. NaN: no reward; ignored in means and
            deviations, advantage 0.
        group_size: answers per prompt.
        scale: the standard deviation of the group, of the batch, or "none" for a divisor of 1.
    """
    require_known("scale", scale, get_args(RewardScale))
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards cannot be divided into groups of group_size {group_size}")
    groups = rewards.view(-1, group_size)
    unknown = groups.isnan()
    # Explicit, because the mean of equal numbers may have a rounding error.
    equal = groups.masked_fill(unknown, -math.inf).amax(1) <= groups.masked_fill(unknown, math.inf).amin(1)
    centered = (groups - groups.nanmean(1, keepdim=True)).masked_fill(unknown | equal[:, None], 0.0)
    if scale == "none":
        return centered.flatten()
    return (centered / (known_deviation(groups if scale == "group" else rewards[None]) + 1e-4)).flatten()


def known_deviation(values: Tensor) -> Tensor:
    """Standard deviation of each row of `values` [R, C], ignoring NaN: [R, 1]; 0 for fewer than two numbers."""
    known = (~values.isnan()).sum(1, keepdim=True)
    squares = (values - values.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (known - 1).clamp(min=1)).sqrt()


def _check(
    loss: str, beta: float, epsilon_high: float, delta: float | None, reference_log_probs: Tensor | None
) -> None:
    require_known("loss", loss, get_args(PolicyLoss))
    if beta and reference_log_probs is None:
        raise ValueError(f"beta {beta} is the factor of the KL term: pass reference_log_probs")
    if delta is not None and (loss in ("cispo", "sapo") or delta < 1 + epsilon_high):
        raise ValueError(
            f"delta {delta} must be at least 1 + epsilon_high {1 + epsilon_high}, and not for cispo or sapo"
        )
