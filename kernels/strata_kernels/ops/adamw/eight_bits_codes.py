"""The 256 values of 8-bit moments, and the constants of the map from magnitudes to codes.

Between 1e-7 and 1, each decade is divided into cells of equal width, twice as many as in the decade below; the value of
a cell is its midpoint. The other values are 0 and 1. First moments have 1 to 64 cells per decade and sign, second
moments 2 to 128. Zero is code 127 of first moments and code 0 of second moments.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861), with the values of
bitsandbytes.
"""

from __future__ import annotations

from functools import cache
from math import log2, log10

import torch
from torch import Tensor

BLOCK = 256
"""Number of consecutive elements that share a scale."""

DECADES = 7
# Index of a magnitude's cell, from 1, if the first decade has one cell: the floor of
# magnitude * CELLS * (2 / 10)^decade + 2^decade * NINTHS.
CELLS, NINTHS = 1e6 / 0.9, 8 / 9
LOG2_5, LOG10_2 = log2(5), log10(2)
# Lower bound of scales.
TINY = 1e-36


@cache
def values_on(device: torch.device) -> Tensor:
    """[2, 256], fp32: values of the codes of first and second moments, ascending."""
    positive = [_middles(1), _middles(2)]
    zero, one = torch.zeros(1), torch.ones(1)
    first = torch.cat([-positive[0].flip(0), zero, positive[0], one])
    return torch.stack([first, torch.cat([zero, positive[1], one])]).to(device)


def _middles(first: int) -> Tensor:
    """The midpoints of all cells, if the first decade has `first` cells."""
    found = []
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, first * 2**decade + 1, dtype=torch.float32)
        found.append(10.0 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2))
    return torch.cat(found)
