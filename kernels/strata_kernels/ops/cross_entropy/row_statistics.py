"""Statistics of rows of logits, from which losses and gradients are computed.

With m the maximum over V columns, which may be a shard of the vocabulary:

    largest    = m                                   log_sum    = log Σ_v exp(z_v - m)
    linear     = (1 - ε) w_target (z_target - m) + (ε / V) Σ_v w_v (z_v - m)
    lse_weight = (1 - ε) w_target + (ε / V) Σ_v w_v
    mean       = Σ_v p_v (z_v - m)                   entropy    = -Σ_v p_v log p_v = log_sum - mean

Statistics of shards can be combined into those of the vocabulary. largest and log_sum are separate, because for large
logits their rounded sum lse would be too inaccurate for the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Options of a row's loss; softcap 0.0 is none. Logits are divided by the temperature after the softcap."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    temperature: float = 1.0


@dataclass(frozen=True)
class Columns:
    """The columns of the vocabulary that a tensor of logits holds: from `start`, out of `total`."""

    start: int
    total: int


class Statistics(NamedTuple):
    """Statistics of rows over all or some columns, each [N], fp32 (fp64 for fp64); 0 for ignored rows.

    largest: as above; finite if all logits are -inf; NaN if predictions are requested and a logit is NaN.
    log_sum, linear: as above.
    lse_weight: as above; None if it is 1: all columns, no class weights.
    prediction: int64, first column of the maximum logit, as an index of the vocabulary; -1 for ignored rows; None
        unless requested.
    mean: as above; None unless requested.
    """

    largest: Tensor
    log_sum: Tensor
    linear: Tensor
    lse_weight: Tensor | None
    prediction: Tensor | None
    mean: Tensor | None = None

    def of(self, rows: slice) -> Statistics:
        """The statistics of a slice of the rows."""
        optional = (None if field is None else field[rows] for field in self[3:])
        return Statistics(*(field[rows] for field in self[:3]), *optional)

    @classmethod
    def combined(cls, parts: Self) -> Self:
        """Statistics over all columns, from those of shards, stacked as [shards, N] in column order."""
        largest = parts.largest.amax(0)
        difference = parts.largest - largest
        assert parts.lse_weight is not None
        prediction = None
        if parts.prediction is not None:
            # The first shard in a tie, independent of the device's reduction order.
            best = torch.where(largest.isnan(), parts.largest.isnan(), parts.largest == largest)
            prediction = parts.prediction.where(best, torch.iinfo(torch.int64).max).amin(0)
        log_sum = (difference + parts.log_sum).logsumexp(0)
        mean = None
        if parts.mean is not None:
            # 0 for a shard whose logits are all -inf.
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
    """The losses [N] of rows from their statistics over all columns."""
    log_sum = whole.log_sum if whole.lse_weight is None else whole.lse_weight * whole.log_sum
    loss = log_sum - whole.linear + options.z_loss * (whole.largest + whole.log_sum).square()
    return loss.where(target != options.ignore_index, 0.0)
