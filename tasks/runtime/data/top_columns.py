"""A teacher's likeliest tokens as columns of rows, read from shards that have them for the tokens with loss alone."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.runtime.data.formats.teacher_columns import TopTokens

TOP_COLUMNS = ("top_token_ids", "top_log_probs")
"""A teacher's likeliest tokens for each token with loss: [T, K], int64 and fp32; zeros for the others."""


def top_columns(shard: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The columns of TOP_COLUMNS of the tokens from `begin` to before `end`."""
    targets = shard["targets"]
    first = int(targets[:begin].sum())
    own = targets[begin:end]
    known = slice(first, first + int(own.sum()))
    found: dict[str, Tensor] = {}
    for name, dtype in zip(TOP_COLUMNS, (torch.int64, torch.float32), strict=True):
        values = shard[name][known]
        found[name] = torch.zeros(end - begin, values.shape[1], dtype=dtype)
        found[name][own] = values.to(dtype)
    return found


def with_one_width(batch: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The rows with as many of a teacher's tokens at each position: shards may differ."""
    if TOP_COLUMNS[0] not in batch[0]:
        return batch
    widths = [row[TOP_COLUMNS[0]].shape[1] for row in batch]
    width = max(widths)
    if min(widths) == width:
        return batch
    found = [TopTokens(*(row[name].numpy() for name in TOP_COLUMNS)).widened(width) for row in batch]
    return [
        row | dict(zip(TOP_COLUMNS, map(torch.from_numpy, top), strict=True))
        for row, top in zip(batch, found, strict=True)
    ]
