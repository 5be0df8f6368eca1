"""linear_preference and linear_kto: losses of answers, from hidden states and an LM head.

Formulas: `strata_kernels.preference`. 8·N·H·V FLOPs, 6·N·H·V with a frozen head, for N rows with a target.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..._checks import require_known
from ...preference import KtoLoss, PairLoss, cpo_losses, dpo_losses, kto_losses, orpo_losses, simpo_losses
from .._launch import describe
from ..linear_cross_entropy.linear_logprobs import linear_logprobs

ReferenceFree = Literal["cpo", "simpo", "orpo"]
Preference = PairLoss | ReferenceFree


class PairTerms(NamedTuple):
    """Results of `linear_preference`.

    loss: scalar, differentiable.
    chosen, rejected: [B], log-probabilities of the answers, summed over their tokens, without gradient.
    """

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


class AnswerTerms(NamedTuple):
    """Results of `linear_kto`.

    loss: scalar, differentiable.
    answers: [B], log-probabilities of the answers, summed over their tokens, without gradient.
    """

    loss: Tensor
    answers: Tensor


def linear_preference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    reference: Tensor | None = None,
    *,
    loss: Preference = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    gamma: float = 1.0,
    nll_weight: float | None = None,
    num_items: int | Tensor | None = None,
    **options: Any,
) -> PairTerms:
    """Loss of pairs of answers: one of DPO's eleven losses, CPO, SimPO or ORPO. Logits are never all materialized.

    Equivalent to::

        log_probs = F.linear(x, weight).float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        chosen, rejected = (log_probs * (target != -100)).sum(1).chunk(2)
        losses = dpo_losses(chosen, rejected, *reference.chunk(2), loss=loss, beta=beta)
        loss = (losses - nll_weight * chosen / chosen_tokens).sum() / (num_items or len(losses))

    Args:
        x: [2 B, T, H], hidden states of the chosen answers, then of the rejected ones; dtypes as in `linear_logprobs`.
        weight: [V, H], LM head.
        target: [2 B, T], int64: the token that each position predicts, -100 for tokens outside answers.
        reference: [2 B], log-probabilities of the answers under the reference model, summed over their tokens; None for
            cpo, simpo and orpo.
        loss: a loss of `dpo_losses`, or cpo, simpo, orpo.
        beta, label_smoothing, discopop_tau: as in `dpo_losses`.
        gamma: margin of simpo; simpo's beta is usually about 2.
        nll_weight: factor of the negative log-likelihood per token of the chosen answers; default 1 for cpo and orpo,
            else 0.
        num_items: number of pairs of the whole step, over micro-batches and processes; default B.
        options: bias, softcap, temperature, ignore_index, max_targets, group, accumulate, chunk_bytes of
            `linear_logprobs`.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(4, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> linear_preference(x, weight, torch.randint(32, (4, 8)), torch.full((4,), -20.0)).loss.backward()
    """
    require_known("loss", loss, (*get_args(PairLoss), *get_args(ReferenceFree)))
    _check_sequences(x, target)
    if x.shape[0] % 2:
        raise ValueError(f"x {describe(x)} must have the chosen answers, then as many rejected ones")
    if (reference is None) != (loss in get_args(ReferenceFree)):
        raise ValueError(f"loss {loss!r} {'needs' if reference is None else 'has no'} reference log-probabilities")
    sums, tokens = _sums(x, weight, target, options)
    (chosen, rejected), counts = sums.chunk(2), tokens.chunk(2)
    if loss == "simpo":
        losses = simpo_losses(chosen, rejected, *counts, beta=beta, gamma=gamma, label_smoothing=label_smoothing)
    elif loss == "orpo":
        losses = orpo_losses(chosen, rejected, *counts, beta=beta)
    elif loss == "cpo":
        losses = cpo_losses(chosen, rejected, beta=beta, label_smoothing=label_smoothing)
    else:
        assert reference is not None
        _check_reference(reference, x.shape[0])
        losses = dpo_losses(
            chosen, rejected, *reference.detach().chunk(2), loss=loss, beta=beta, label_smoothing=label_smoothing,
            discopop_tau=discopop_tau, chosen_tokens=counts[0], rejected_tokens=counts[1],
        )  # fmt: skip
    weight_of_nll = float(loss in ("cpo", "orpo")) if nll_weight is None else nll_weight
    if weight_of_nll:
        losses = losses - weight_of_nll * chosen / counts[0].clamp(min=1)
    return PairTerms(_mean(losses, num_items), chosen.detach(), rejected.detach())


def linear_kto(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    loss: KtoLoss = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_items: int | Tensor | None = None,
    **options: Any,
) -> AnswerTerms:
    """KTO loss of single answers, each desirable or undesirable. Logits are never all materialized.

    Equivalent to::

        log_probs = F.linear(x, weight).float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        answers = (log_probs * (target != -100)).sum(1)
        loss = kto_losses(answers, reference, desirable, kl, loss=loss, beta=beta).sum() / (num_items or len(answers))

    Args:
        x: [B, T, H], hidden states; dtypes as in `linear_logprobs`. weight: [V, H], LM head.
        target: [B, T], int64: the token that each position predicts, -100 for tokens outside answers.
        reference: [B], log-probabilities of the answers under the reference model, summed over their tokens.
        desirable: [B], bool.
        kl: scalar, result of `kto_kl`.
        loss, beta, desirable_weight, undesirable_weight: as in `kto_losses`.
        num_items: number of answers of the whole step; default B.
        options: as in `linear_preference`.

    Raises:
        ValueError: a wrong shape, dtype or option.

    Example:
        >>> x, weight = torch.randn(2, 8, 16), torch.randn(32, 16, requires_grad=True)
        >>> target, good = torch.randint(32, (2, 8)), torch.tensor([True, False])
        >>> linear_kto(x, weight, target, torch.full((2,), -20.0), good, torch.tensor(0.1)).loss.backward()
    """
    _check_sequences(x, target)
    _check_reference(reference, x.shape[0])
    if desirable.shape != x.shape[:1] or desirable.dtype != torch.bool:
        raise ValueError(f"desirable {describe(desirable)} must be bool [{x.shape[0]}], one per answer")
    answers, _ = _sums(x, weight, target, options)
    losses = kto_losses(
        answers, reference.detach(), desirable, kl, loss=loss, beta=beta, desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )  # fmt: skip
    return AnswerTerms(_mean(losses, num_items), answers.detach())


def _sums(x: Tensor, weight: Tensor, target: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the answers, numbers of their tokens), each [B]."""
    tokens = (target != options.get("ignore_index", -100)).sum(1)
    return linear_logprobs(x, weight, target, **options).sum(1), tokens


def _mean(losses: Tensor, num_items: int | Tensor | None) -> Tensor:
    return losses.sum() / (losses.shape[0] if num_items is None else num_items)


def _check_sequences(x: Tensor, target: Tensor) -> None:
    if x.dim() != 3 or target.shape != x.shape[:-1]:
        raise ValueError(f"x {describe(x)} and target {describe(target)} must be [B, T, H] and [B, T]")


def _check_reference(reference: Tensor, n_answers: int) -> None:
    if reference.shape != (n_answers,) or not reference.is_floating_point():
        raise ValueError(f"reference {describe(reference)} must be floating point [{n_answers}], one sum per answer")
