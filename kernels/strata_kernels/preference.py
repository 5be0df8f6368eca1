"""Losses of preference and policy optimization, as functions of log-probabilities, in plain PyTorch.

`linear_logprobs` computes log-probabilities of tokens from hidden states, `sequence_sums` their sums per answer. The
functions here compute losses from these small tensors, with autograd. If you have other log-probabilities, call them in
the same way:

    log_probs = linear_logprobs(x, weight, target)                      # [N] tokens
    answers = sequence_sums(log_probs, sequences, n_sequences)          # [S] answers
    losses = dpo_losses(answers[::2], answers[1::2], *reference)        # [S / 2] pairs

Log-probabilities are natural logarithms in fp32 or fp64; that of an answer is the sum over its tokens. Results have the
same dtype. Losses are not reduced: there is one per pair, answer or token. Divide their sum by the number of items of
the whole step, so that the loss does not depend on accumulation or the number of processes. Reference log-probabilities
need no gradient. No function synchronizes with the device. A token outside answers (prompt, padding, tool output) has
sequence -1.

Formulas, with r = log p(answer) - log p_reference(answer), of the chosen answer r_w and the rejected one r_l, and
Δ = r_w - r_l, ε the label smoothing, s the logistic function; each equals TRL's:

    sigmoid    -(1 - ε) log s(β Δ) - ε log s(-β Δ)                                      arXiv:2305.18290
    hinge      max(0, 1 - β Δ)                                                          arXiv:2305.10425
    ipo        (r_w / tokens_w - r_l / tokens_l - 1 / (2 β))²                           arXiv:2310.12036
    exo_pair   s(β Δ) (log s(β Δ) - log(1 - ε)) + s(-β Δ) (log s(-β Δ) - log ε)         arXiv:2402.00856
    nca_pair   -log s(β r_w) - log s(-β r_w) / 2 - log s(-β r_l) / 2                    arXiv:2402.05369
    robust     (-(1 - ε) log s(β Δ) + ε log s(-β Δ)) / (1 - 2 ε)                        arXiv:2403.00409
    bco_pair   -log s(β r_w) - log s(-β r_l)                                            arXiv:2404.04656, δ = 0
    sppo_hard  (r_w - 1 / (2 β))² + (r_l + 1 / (2 β))²                                  arXiv:2405.00675
    apo_zero   1 - s(β r_w) + s(β r_l)                                                  arXiv:2408.06266
    apo_down   s(β r_w) + 1 - s(β Δ)                                                    arXiv:2408.06266
    discopop   -log s(β Δ) (1 - m) + exp(-β Δ) m, with m = s(β Δ / τ)                   arXiv:2406.08414
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ._checks import require_known, require_positive

PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
]  # fmt: skip
CpoLoss = Literal["sigmoid", "hinge", "ipo"]
KtoLoss = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True)
class _Pairs:
    """Inputs of the formulas: log-ratios [B], with the symbols of the module's docstring."""

    chosen: Tensor
    rejected: Tensor
    tokens: tuple[Tensor, Tensor] | None
    beta: float
    smoothing: float
    tau: float

    @property
    def delta(self) -> Tensor:
        return self.beta * (self.chosen - self.rejected)


def _smoothed(delta: Tensor, smoothing: float) -> Tensor:
    loss = -(1 - smoothing) * logsigmoid(delta)
    return loss - smoothing * logsigmoid(-delta) if smoothing else loss


def _ipo(pairs: _Pairs) -> Tensor:
    assert pairs.tokens is not None
    chosen, rejected = (_per_token(x, n) for x, n in zip((pairs.chosen, pairs.rejected), pairs.tokens, strict=True))
    return (chosen - rejected - 0.5 / pairs.beta).square()


def _exo_pair(pairs: _Pairs) -> Tensor:
    won, lost = logsigmoid(pairs.delta), logsigmoid(-pairs.delta)
    return won.exp() * (won - math.log1p(-pairs.smoothing)) + lost.exp() * (lost - math.log(pairs.smoothing))


def _nca_pair(pairs: _Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pairs: _Pairs) -> Tensor:
    kept, flipped = (1 - pairs.smoothing) * logsigmoid(pairs.delta), pairs.smoothing * logsigmoid(-pairs.delta)
    return (flipped - kept) / (1 - 2 * pairs.smoothing)


def _discopop(pairs: _Pairs) -> Tensor:
    share = torch.sigmoid(pairs.delta / pairs.tau)
    return -logsigmoid(pairs.delta) * (1 - share) + torch.exp(-pairs.delta) * share


_PAIR_LOSSES: Mapping[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda pairs: _smoothed(pairs.delta, pairs.smoothing),
    "hinge": lambda pairs: torch.relu(1 - pairs.delta),
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": lambda pairs: -logsigmoid(pairs.beta * pairs.chosen) - logsigmoid(-pairs.beta * pairs.rejected),
    "sppo_hard": lambda pairs: (
        (pairs.chosen - 0.5 / pairs.beta).square() + (pairs.rejected + 0.5 / pairs.beta).square()
    ),
    "apo_zero": lambda pairs: torch.sigmoid(-pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected),
    "apo_down": lambda pairs: torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(-pairs.delta),
    "discopop": _discopop,
}


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    loss: PairLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> Tensor:
    """Losses of pairs with a reference model, by a formula of this module's docstring: [B].

    Args:
        chosen, rejected: [B], log-probabilities of the answers, summed over their tokens.
        reference_chosen, reference_rejected: [B], those of the reference model.
        loss: the formula.
        beta: β, positive.
        label_smoothing: ε in [0, 0.5), for sigmoid, robust and exo_pair; positive for exo_pair.
        discopop_tau: τ of discopop, positive.
        chosen_tokens, rejected_tokens: [B], numbers of tokens of the answers; required for ipo.

    Raises:
        ValueError: an invalid option.
    """
    require_known("loss", loss, get_args(PairLoss))
    require_positive("beta", beta)
    require_positive("discopop_tau", discopop_tau)
    _check_smoothing(loss, label_smoothing)
    if loss == "ipo" and (chosen_tokens is None or rejected_tokens is None):
        raise ValueError("loss 'ipo' is per token: pass chosen_tokens and rejected_tokens")
    tokens = None if chosen_tokens is None or rejected_tokens is None else (chosen_tokens, rejected_tokens)
    ratios = chosen - reference_chosen, rejected - reference_rejected
    return _PAIR_LOSSES[loss](_Pairs(*ratios, tokens, beta, label_smoothing, discopop_tau))


def cpo_losses(
    chosen: Tensor, rejected: Tensor, *, loss: CpoLoss = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0,
    chosen_tokens: Tensor | None = None, rejected_tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The preference part of CPO (arXiv:2401.08417): `dpo_losses` with a uniform reference, [B].

    CPO adds the negative log-likelihood of the chosen answer, usually per token: `-chosen / chosen_tokens`.

    Args:
        chosen, rejected: [B], log-probabilities of the answers, summed over their tokens.
        loss, beta, label_smoothing, chosen_tokens, rejected_tokens: as in `dpo_losses`.
    """
    require_known("loss", loss, get_args(CpoLoss))
    zero = torch.zeros_like(chosen, requires_grad=False)
    return dpo_losses(
        chosen, rejected, zero, zero, loss=loss, beta=beta, label_smoothing=label_smoothing,
        chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
    )  # fmt: skip


def simpo_losses(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor,
    *, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """SimPO (arXiv:2405.14734): -log s(β (log p_w / tokens_w - log p_l / tokens_l) - gamma), [B].

    Args:
        chosen, rejected: [B], log-probabilities of the answers, summed over their tokens.
        chosen_tokens, rejected_tokens: [B], numbers of tokens of the answers.
        beta: β, positive. gamma: target reward margin.
        label_smoothing: as for the loss sigmoid of `dpo_losses`.
    """
    require_positive("beta", beta)
    _check_smoothing("sigmoid", label_smoothing)
    margin = beta * (_per_token(chosen, chosen_tokens) - _per_token(rejected, rejected_tokens)) - gamma
    return _smoothed(margin, label_smoothing)


def orpo_losses(
    chosen: Tensor, rejected: Tensor, chosen_tokens: Tensor, rejected_tokens: Tensor, *, beta: float = 0.1
) -> Tensor:
    """The odds-ratio part of ORPO (arXiv:2403.07691): -β log s(log odds_w - log odds_l), [B].

    odds = p / (1 - p) with log p per token. ORPO adds the negative log-likelihood of the chosen answer, usually per
    token: `-chosen / chosen_tokens`. If p rounds to 1, log p is clamped below 0 and has no gradient.

    Args:
        chosen, rejected: [B], log-probabilities of the answers, summed over their tokens.
        chosen_tokens, rejected_tokens: [B], numbers of tokens of the answers.
        beta: β, λ in the paper, positive.
    """
    require_positive("beta", beta)
    likely, unlikely = _per_token(chosen, chosen_tokens), _per_token(rejected, rejected_tokens)
    return -beta * logsigmoid(_log_odds(likely) - _log_odds(unlikely))


def kto_losses(
    answers: Tensor, reference: Tensor, desirable: Tensor, kl: Tensor,
    *, loss: KtoLoss = "kto", beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Losses of single answers (arXiv:2402.01306), [B]; r the log-ratio to the reference, w the weights.

        kto                  desirable w (1 - s(β (r - kl)))       undesirable w (1 - s(β (kl - r)))
        apo_zero_unpaired    desirable w (1 - s(β r))              undesirable w s(β r)

    Args:
        answers, reference: [B], log-probabilities of the answers, summed over their tokens.
        desirable: [B], bool.
        kl: scalar from `kto_kl`, averaged over processes; not read by apo_zero_unpaired.
        loss, beta: the formula and its β, positive.
        desirable_weight, undesirable_weight: factors, not negative.
    """
    require_known("loss", loss, get_args(KtoLoss))
    require_positive("beta", beta)
    shift = kl.detach() if loss == "kto" else 0.0
    sign = torch.where(desirable, -beta, beta).to(answers.dtype)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(answers.dtype)
    return weight * torch.sigmoid(sign * (answers - reference - shift))


def kto_kl(answers: Tensor, reference: Tensor) -> Tensor:
    """Estimate of the KL divergence from the reference model, `kl` of `kto_losses`: a scalar, without gradient.

    Args:
        answers, reference: [B], log-probabilities of answers paired with other prompts. With several processes, average
            `answers - reference` over all of them instead, then clamp.
    """
    return (answers - reference).detach().mean().clamp(min=0)


def sequence_sums(values: Tensor, sequences: Tensor, n_sequences: int) -> Tensor:
    """Sums over the tokens of each sequence: [S]. Bitwise reproducible, on a GPU too.

    Equivalent to `values.new_zeros(S).index_add(0, sequences, values)`, which on a GPU adds in undefined order.

    Args:
        values: [N], fp32 or fp64.
        sequences: [N], int64: which of the S sequences a token belongs to, -1 for none.
        n_sequences: S. Allocates S · N elements.
    """
    own = sequences == torch.arange(n_sequences, device=sequences.device)[:, None]
    return values.where(own, 0.0).sum(1)


def _per_token(total: Tensor, tokens: Tensor) -> Tensor:
    return total / tokens.clamp(min=1)


def _log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p ≤ 0; value and gradient are finite if p rounds to 1."""
    x = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    # Each branch gets arguments for which it neither cancels nor overflows.
    small = x < -math.log(2)
    return x - torch.where(
        small, torch.log1p(-x.where(small, -1.0).exp()), torch.log(-torch.expm1(x.where(~small, -0.1)))
    )


def _check_smoothing(loss: str, smoothing: float) -> None:
    if smoothing and loss not in ("sigmoid", "robust", "exo_pair"):
        raise ValueError(
            f"label_smoothing {smoothing} is for sigmoid, robust and exo_pair, not for {loss}; leave it out"
        )
    if not 0.0 <= smoothing < 0.5:
        raise ValueError(f"label_smoothing {smoothing} must be at least 0 and less than 0.5")
    if loss == "exo_pair" and not smoothing:
        raise ValueError("loss 'exo_pair' needs a positive label_smoothing, such as 1e-3: the loss has its log")
