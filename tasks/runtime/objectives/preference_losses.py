"""Losses of a pair of answers, each from a number for the chosen and one for the rejected answer.

Answers in `dpo` have log-ratios r = log p(answer | prompt) - log p_reference(answer | prompt). With d = r_c - r_r of
the chosen and the rejected one, ε the label smoothing, s the sigmoid, and |c|, |r| the answers' tokens:

    sigmoid    -(1 - ε) log s(β d) - ε log s(-β d)                    Rafailov et al. (arXiv:2305.18290)
    hinge      max(0, 1 - β d)                                        Zhao et al. (arXiv:2305.10425)
    ipo        (r_c / |c| - r_r / |r| - 1 / (2β))²                    Azar et al. (arXiv:2310.12036)
    exo_pair   KL((s(β d), s(-β d)) || (1 - ε, ε))                    Ji et al. (arXiv:2402.00856)
    nca_pair   -log s(β r_c) - (log s(-β r_c) + log s(-β r_r)) / 2    Chen et al. (arXiv:2402.05369)
    robust     (-(1 - ε) log s(β d) + ε log s(-β d)) / (1 - 2ε)       Chowdhury et al. (arXiv:2403.00409)
    bco_pair   -log s(β r_c) - log s(-β r_r)                          Jung et al. (arXiv:2404.04656), without its shift
    sppo_hard  (r_c - 1 / (2β))² + (r_r + 1 / (2β))²                  Wu et al. (arXiv:2405.00675)
    apo_zero   1 - s(β r_c) + s(β r_r)                                D'Oosterlinck et al. (arXiv:2408.06266)
    apo_down   s(β r_c) + 1 - s(β d)                                  the same
    discopop   -(1 - m) log s(β d) + m exp(-β d), m = s(β d / τ)      Lu et al. (arXiv:2406.08414)

IPO's authors advise log-ratios per token: otherwise long answers would weigh more.

Without a reference there are log-probabilities, m_c and m_r those per token:

    cpo        -(1 - ε) log s(β d) - ε log s(-β d) - a m_c            Xu et al. (arXiv:2401.08417), a: `alpha`
    simpo      -(1 - ε) log s(z) - ε log s(-z)                        Meng et al. (arXiv:2405.14734)
               with z = β (m_c - m_r) - g, g: `gamma`
    orpo       -m_c - β log s(log odds(m_c) - log odds(m_r))          Hong et al. (arXiv:2403.07691)
               with odds(m) = exp(m) / (1 - exp(m))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from strata_platform.spec.objectives import Dpo

DISCOPOP_TAU = 0.05
# Beyond it, 1 - exp(m) is 0 even in fp64.
_SUREST = -1e-15


class Pairs(NamedTuple):
    """Sums over the tokens of each answer, and their numbers: four tensors [P], fp64.

    The sums are log-probabilities, or log-ratios to a reference.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def per_token(self) -> tuple[Tensor, Tensor]:
        """The means over the tokens of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def dpo_losses(pairs: Pairs, settings: Dpo) -> Tensor:
    """The loss of each pair of log-ratios: [P]."""
    return _DPO_LOSSES[settings.loss](pairs, settings)


def smoothed(z: Tensor, smoothing: float) -> Tensor:
    """-(1 - ε) log s(z) - ε log s(-z), with s the sigmoid and ε the smoothing."""
    return -(1.0 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(m), for m < 0, without cancellation."""
    m = mean_log_prob.clamp(max=_SUREST)
    small = m < -0.6931471805599453
    # Each branch gets values that it is finite for, so that the gradient of the other is not NaN.
    far, near = m.where(small, -1.0), m.where(~small, -0.5)
    return m - torch.where(small, torch.log1p(-far.exp()), torch.log(-torch.expm1(near)))


def _difference(pairs: Pairs, settings: Dpo) -> Tensor:
    return settings.beta * (pairs.chosen - pairs.rejected)


def _rewards(pairs: Pairs, settings: Dpo) -> tuple[Tensor, Tensor]:
    return settings.beta * pairs.chosen, settings.beta * pairs.rejected


def _ipo(pairs: Pairs, settings: Dpo) -> Tensor:
    chosen, rejected = pairs.per_token()
    return (chosen - rejected - 0.5 / settings.beta).square()


def _exo_pair(pairs: Pairs, settings: Dpo) -> Tensor:
    z, smoothing = _difference(pairs, settings), torch.tensor(settings.label_smoothing, dtype=torch.float64)
    terms = ((z, torch.log1p(-smoothing)), (-z, torch.log(smoothing)))
    first, second = (torch.sigmoid(side) * (logsigmoid(side) - target) for side, target in terms)
    return first + second


def _nca_pair(pairs: Pairs, settings: Dpo) -> Tensor:
    chosen, rejected = _rewards(pairs, settings)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(pairs: Pairs, settings: Dpo) -> Tensor:
    z, smoothing = _difference(pairs, settings), settings.label_smoothing
    return (smoothing * logsigmoid(-z) - (1.0 - smoothing) * logsigmoid(z)) / (1.0 - 2.0 * smoothing)


def _bco_pair(pairs: Pairs, settings: Dpo) -> Tensor:
    chosen, rejected = _rewards(pairs, settings)
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def _sppo_hard(pairs: Pairs, settings: Dpo) -> Tensor:
    half = 0.5 / settings.beta
    return (pairs.chosen - half).square() + (pairs.rejected + half).square()


def _apo_zero(pairs: Pairs, settings: Dpo) -> Tensor:
    chosen, rejected = _rewards(pairs, settings)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, settings: Dpo) -> Tensor:
    return torch.sigmoid(settings.beta * pairs.chosen) + torch.sigmoid(-_difference(pairs, settings))


def _discopop(pairs: Pairs, settings: Dpo) -> Tensor:
    z, tau = _difference(pairs, settings), settings.discopop_tau or DISCOPOP_TAU
    mixture = torch.sigmoid(z / tau)
    return -(1.0 - mixture) * logsigmoid(z) + mixture * torch.exp(-z)


_DPO_LOSSES: dict[str, Callable[[Pairs, Dpo], Tensor]] = {
    "sigmoid": lambda pairs, settings: smoothed(_difference(pairs, settings), settings.label_smoothing),
    "hinge": lambda pairs, settings: torch.relu(1.0 - _difference(pairs, settings)),
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
