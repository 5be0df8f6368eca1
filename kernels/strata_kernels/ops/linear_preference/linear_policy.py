"""linear_grpo: losses of policy optimization, from hidden states and an LM head.

Formulas: `strata_kernels.policy`. 8·N·H·V FLOPs, 6·N·H·V with a frozen head, for N rows with a target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policy import PolicyLoss, policy_losses, policy_weights
from .._launch import describe
from ..linear_cross_entropy.linear_logprobs import linear_logprobs


class GrpoTerms(NamedTuple):
    """Results of `linear_grpo`.

    loss: scalar, differentiable.
    log_probs: [B, T], of the tokens, without gradient; 0 for tokens outside answers.
    kl, clipped: [B, T], as in `PolicyTerms`, without gradient.
    """

    loss: Tensor
    log_probs: Tensor
    kl: Tensor
    clipped: Tensor


def linear_grpo(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
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
    total_sequences: int | Tensor | None = None,
    total_tokens: int | Tensor | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> GrpoTerms:
    """Policy loss grpo, bnpo, dr_grpo, dapo, gspo, cispo or sapo. Logits are never all materialized.

    Equivalent to::

        log_probs = F.linear(x, weight).float().div(temperature).log_softmax(-1)
        log_probs = log_probs.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target != -100)
        sequences = torch.arange(B)[:, None].where(target != -100, -1).flatten()
        terms = policy_losses(log_probs.flatten(), advantages, sequences, loss=loss, ...)
        loss = (terms.loss * policy_weights(sequences, B, loss=loss, ...)).sum()

    Args:
        x: [B, T, H], hidden states; dtypes as in `linear_logprobs`. weight: [V, H].
        target: [B, T], int64: the token that each position predicts, -100 for tokens outside answers.
        advantages: [B], e.g. from `group_advantages`.
        loss, beta, epsilon_low, epsilon_high, delta, sapo_temperatures: as in `policy_losses`.
        old_log_probs: [B, T], of the policy in the denominator of the ratio; default: this policy's, detached.
        reference_log_probs: [B, T], of the reference model; required if beta is not 0.
        importance_weights: [B, T], e.g. from `truncated_importance_weights`.
        total_sequences, total_tokens, max_tokens: totals of the whole step, as in `policy_weights`.
        options: bias, softcap, temperature, ignore_index, max_targets, group, accumulate, chunk_bytes of
            `linear_logprobs`. Use the temperature of sampling.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_grpo(x, weight, torch.randint(32, (2, 8)), torch.tensor([1.0, -1.0])).loss.backward()
    """
    if x.dim() != 3 or target.shape != x.shape[:-1] or advantages.shape != x.shape[:1]:
        raise ValueError(
            f"x {describe(x)}, target {describe(target)} and advantages {describe(advantages)} must be [B, T, H], "
            "[B, T] and [B]"
        )
    given = {
        "old_log_probs": old_log_probs,
        "reference_log_probs": reference_log_probs,
        "importance_weights": importance_weights,
    }
    for name, values in given.items():
        if values is not None and values.shape != target.shape:
            raise ValueError(f"{name} {describe(values)} must be {list(target.shape)}, the shape of target")
    n_sequences = x.shape[0]
    number = torch.arange(n_sequences, device=target.device)[:, None]
    sequences = number.where(target != options.get("ignore_index", -100), -1).flatten()
    log_probs = linear_logprobs(x, weight, target, **options)
    terms = policy_losses(
        log_probs.flatten(), advantages, sequences, loss=loss, beta=beta, epsilon_low=epsilon_low,
        epsilon_high=epsilon_high, delta=delta, sapo_temperatures=sapo_temperatures,
        **{name: None if values is None else values.detach().flatten() for name, values in given.items()},
    )  # fmt: skip
    weights = policy_weights(
        sequences, n_sequences, loss=loss, total_sequences=total_sequences, total_tokens=total_tokens,
        max_tokens=max_tokens,
    )  # fmt: skip
    kl, clipped = (values.view(target.shape) for values in (terms.kl, terms.clipped))
    return GrpoTerms((terms.loss * weights).sum(), log_probs.detach(), kl, clipped)
