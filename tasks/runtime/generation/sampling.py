"""Drawing tokens, with random numbers that do not depend on what else is generated at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tasks.runtime.generation.generator import Sampling


def uniform_numbers(seed: int, keys: Sequence[int], count: int) -> Tensor:
    """The first `count` numbers in [0, 1) of the stream of each key, by Philox, a counter-based generator: [B, count],
    fp64.

    PyTorch's own generators give a row other numbers in another batch.
    """
    streams = (np.random.Generator(np.random.Philox(key=np.array([seed, key], dtype=np.uint64))) for key in keys)
    return torch.from_numpy(np.stack([stream.random(count) for stream in streams]))


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(the token that each row draws [B], int64; its log-probability [B], fp32), without waiting for the device.

    logits: [B, V]. uniform: [B], fp64, in [0, 1). The token is the first whose cumulative probability is above
    `uniform`, so equal logits and numbers give equal tokens.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    drawn = sampling.temperature > 0
    tokens = _draw(_kept(scaled, sampling).softmax(-1), uniform) if drawn else scaled.argmax(-1)
    return tokens, scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def _kept(scaled: Tensor, sampling: Sampling) -> Tensor:
    """The logits with -inf for tokens that are not drawn."""
    if 0 < sampling.top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[:, -1:], -math.inf)
    if sampling.top_p < 1.0:
        ordered = scaled.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(-1)
        likelier = probabilities.cumsum(-1) - probabilities
        # The likeliest token always stays.
        least = ordered.masked_fill(likelier >= sampling.top_p, math.inf).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    return scaled


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling in two levels: a chunk of the vocabulary, then a token in it.

    Sums are products with a triangular matrix: a GPU's cumulative sum is not the same in each run.
    """
    size = math.isqrt(probabilities.shape[-1] - 1) + 1
    chunks = pad(probabilities, (0, size * size - probabilities.shape[-1])).view(-1, size, size)
    upper = torch.ones(size, size, dtype=torch.float64, device=chunks.device).triu()
    masses = chunks.sum(-1, dtype=torch.float64)
    ends = masses @ upper
    threshold = uniform[:, None] * ends[:, -1:]
    chunk = _first_above(masses, ends, threshold)
    inside = chunks.gather(1, chunk[..., None].expand(-1, -1, size))[:, 0].double()
    rest = threshold - (ends - masses).gather(1, chunk)
    return (chunk * size + _first_above(inside, inside @ upper, rest))[:, 0]


def _first_above(values: Tensor, sums: Tensor, threshold: Tensor) -> Tensor:
    """The index of the first positive value whose cumulative sum is above `threshold` [B, 1], or of the last positive
    one, where rounding has put the threshold beyond: [B, 1].
    """
    positive = values > 0
    above = (sums > threshold) & positive
    last = values.shape[-1] - 1 - positive.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.where(above.any(-1, keepdim=True), above.to(torch.uint8).argmax(-1, keepdim=True), last)
