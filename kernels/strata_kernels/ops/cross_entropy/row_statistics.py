"""Statistics of rows of logits, from which their losses and gradients follow.

With m the largest of the logits at hand, which may be a part of the vocabulary:

    largest    = m                                   log_sum    = log Σ_v exp(z_v - m)
    linear     = (1 - ε) w_target (z_target - m) + (ε / V) Σ_v w_v (z_v - m)
    lse_weight = (1 - ε) w_target + (ε / V) Σ_v w_v
    mean       = Σ_v p_v (z_v - m)                   entropy    = -Σ_v p_v log p_v = log_sum - mean

Those of the whole vocabulary follow from those of its parts. largest and log_sum stay apart: far from zero, their sum
lse would lose the digits of the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """The form of a row's loss; a softcap of 0.0 is none. Logits are divided by the temperature, after the softcap."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    temperature: float = 1.0


@dataclass(frozen=True)
class Columns:
    """Which columns of the vocabulary logits have: those from `start` on, of `total`."""

    start: int
    total: int


class Statistics(NamedTuple):
    """Statistics of rows over some columns of the vocabulary, each [N], fp32 (fp64 for fp64); 0 for ignored rows.

    largest: as above; a finite number where all logits are -inf; NaN where predictions are asked for and a logit is
        NaN.
    log_sum, linear: as above.
    lse_weight: as above; None for 1, over the whole vocabulary without class weights.
    prediction: int64, the first column of the largest logit, counted in the whole vocabulary; -1 in ignored rows; None
        unless asked for.
    mean: as above; None unless asked for.
    """

    largest: Tensor
    log_sum: Tensor
    linear: Tensor
    lse_weight: Tensor | None
    prediction: Tensor | None
    mean: Tensor | None = None

    def of(self, rows: slice) -> Statistics:
        """Those of some of the rows."""
        optional = (None if field is None else field[rows] for field in self[3:])
        return Statistics(*(field[rows] for field in self[:3]), *optional)

    @classmethod
    def combined(cls, parts: Self) -> Self:
        """Statistics over all parts, whose fields are stacked as [parts, N] in the order of their columns."""
        largest = parts.largest.amax(0)
        difference = parts.largest - largest
        assert parts.lse_weight is not None
        prediction = None
        if parts.prediction is not None:
            # The first of equal ones, whatever order the device reduces in.
            best = torch.where(largest.isnan(), parts.largest.isnan(), parts.largest == largest)
            prediction = parts.prediction.where(best, torch.iinfo(torch.int64).max).amin(0)
        log_sum = (difference + parts.log_sum).logsumexp(0)
        mean = None
        if parts.mean is not None:
            # A part whose logits are all -inf has the share 0.
            share = (difference + parts.log_sum - log_sum).exp()
            mean = (share * (parts.mean + difference)).where(share > 0, 0.0).sum(0)
        return cls(
            largest,
            log_sum,
            (parts.linear + parts.lse_weight * difference).sum(0),
            parts.lse_weight.sum(0),
            prediction,
            mean,
        )


def losses_of(whole: Statistics, target: Tensor, options: Options) -> Tensor:
    """The losses [N] of rows from their statistics over the whole vocabulary."""
    log_sum = whole.log_sum if whole.lse_weight is None else whole.lse_weight * whole.log_sum
    loss = log_sum - whole.linear + options.z_loss * (whole.largest + whole.log_sum).square()
    return loss.where(target != options.ignore_index, 0.0)
