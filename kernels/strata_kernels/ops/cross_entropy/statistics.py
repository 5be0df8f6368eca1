"""What is known of the rows of logits: how their losses are shaped, and the numbers that losses and gradients need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """What shapes the loss of a row; a softcap of 0.0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


@dataclass(frozen=True)
class Shard:
    """The columns of the vocabulary that a process holds: those from `start` on, of `total`."""

    start: int
    total: int


class Statistics(NamedTuple):
    """What a shard of the vocabulary adds to the losses of the rows, each [N], fp32 (fp64 for fp64); ignored rows: 0.

    Apart, largest and log_sum keep the digits that their sum, the logsumexp, loses where logits are far from zero.

    largest: the largest logit m of the shard's columns, or a finite number where all are -inf; NaN where predictions
        are asked for and a logit is NaN.
    log_sum: log Σ_v exp(z_v - m) over the shard's columns.
    linear: (1 - ε) w_target (z_target - m) + (ε / V) Σ_v w_v (z_v - m) over the shard's columns.
    share: (1 - ε) w_target + (ε / V) Σ_v w_v, likewise; None for one: the whole vocabulary without class weights.
    prediction: int64, the first column of the largest logit, counted in the whole vocabulary; -1 in ignored rows; None
        unless asked for.
    """

    largest: Tensor
    log_sum: Tensor
    linear: Tensor
    share: Tensor | None
    prediction: Tensor | None

    @classmethod
    def combined(cls, parts: Self) -> Self:
        """Those of the whole vocabulary, from fields [shards, N] with the shards in their order."""
        largest = parts.largest.amax(0)
        apart = parts.largest - largest
        assert parts.share is not None
        prediction = None
        if parts.prediction is not None:
            # The first of equal ones, whatever order the device reduces in.
            best = torch.where(largest.isnan(), parts.largest.isnan(), parts.largest == largest)
            prediction = parts.prediction.where(best, torch.iinfo(torch.int64).max).amin(0)
        return cls(
            largest,
            (apart + parts.log_sum).logsumexp(0),
            (parts.linear + parts.share * apart).sum(0),
            parts.share.sum(0),
            prediction,
        )


def shard_loss(whole: Statistics, target: Tensor, options: Options) -> Tensor:
    """The losses of the rows [N] from statistics of the whole vocabulary: those of the shards, combined."""
    log_sum = whole.log_sum if whole.share is None else whole.share * whole.log_sum
    loss = log_sum - whole.linear + options.z_loss * (whole.largest + whole.log_sum).square()
    return loss.where(target != options.ignore_index, 0.0)
