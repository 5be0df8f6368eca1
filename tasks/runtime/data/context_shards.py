"""Shards of rows for context parallelism.

A row is divided into twice as many chunks as there are context-parallel ranks. Rank i computes chunk i from the start
and chunk i from the end: late tokens attend to more keys than early ones, so this balances the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row, text_tokens
from tasks.runtime.process.ranks import Processes

# The smallest `max_seqlen`. Flash attention starts a program for each block of that many queries.
_MIN_SEQLEN = 128


def context_chunks(processes: Processes) -> tuple[int, int]:
    """Indices of this rank's two chunks."""
    return processes.cp_rank, 2 * processes.cp_size - 1 - processes.cp_rank


def shard_collate(collate: Callable[[list[Row]], Batch], processes: Processes) -> Callable[[list[Row]], Batch]:
    """`collate`, followed by `shard_batch` when context parallelism is on."""
    if processes.cp_size == 1:
        return collate
    return lambda rows: shard_batch(collate(rows), processes)


def shard_batch(batch: Batch, processes: Processes) -> Batch:
    """This rank's tokens of a batch of whole rows.

    Beside them, the labels that they predict, which may be of a token elsewhere (`next_labels`); where in the row the
    document of each begins (`sequence_starts`); which are no padding (`text_tokens`); and where documents end in the
    first and in the second of its chunks (`cu_seqlens`, `late_cu_seqlens`), of which each may have another number. For
    attention over whole rows, both for all tokens (`row_starts`, `row_cu_seqlens`), and `max_seqlen`.
    """
    count = 2 * processes.cp_size
    length = batch["input_ids"].shape[1]
    # The padding to a multiple of the chunks is a document of its own, which begins where the row ends.
    filling = (0, -length % count)
    positions = pad(batch["position_ids"], filling)
    positions[:, length:] = torch.arange(filling[1])
    whole = {
        "input_ids": pad(batch["input_ids"], filling),
        "position_ids": positions,
        "next_labels": pad(batch["labels"][:, 1:], (0, 1 + filling[1]), value=IGNORE_INDEX),
        "sequence_starts": torch.arange(positions.shape[1]) - positions,
        "text_tokens": pad(text_tokens(batch), filling),
    }
    parts = {
        name: torch.cat([tensor.chunk(count, dim=1)[number] for number in context_chunks(processes)], dim=1)
        for name, tensor in whole.items()
    }
    begins = whole["sequence_starts"]
    early, late = (cu_seqlens(begins, number, count) for number in context_chunks(processes))
    whole_rows = {"row_starts": begins, "row_cu_seqlens": cu_seqlens(begins, 0, 1), "max_seqlen": max_seqlen(positions)}
    return {**parts, "cu_seqlens": early, "late_cu_seqlens": late, **whole_rows}


def max_seqlen(positions: Tensor) -> Tensor:
    """An upper bound of the longest sequence, as the first dimension of an empty tensor: [bound, 0], int32.

    The host reads it without waiting for the GPU. positions: [B, T], on the host.
    """
    # Rounded to a power of two, so that a compiled layer sees few sizes.
    bound = max(_MIN_SEQLEN, 1 << int(positions.max()).bit_length())
    # An integer dtype: FSDP's mixed precision would convert a floating-point one.
    return torch.empty(min(bound, positions.shape[1]), 0, dtype=torch.int32)


def cu_seqlens(begins: Tensor, number: int, count: int) -> Tensor:
    """Where documents end among the queries, which are chunk `number` of `count` of the rows, and among their keys.

    Keys are the rows up to the end of the chunk. Those of a row that no query of the chunk sees are one document, which
    has no queries: each that is named costs time. begins: [B, T], where in its row the document of a token begins.
    Returns [2, documents + 1], int32, both counted over all rows from 0 on, as attention over unequal lengths takes
    them.
    """
    rows, length = begins.shape
    size = length // count
    own = begins[:, number * size : (number + 1) * size] + length * torch.arange(rows)[:, None]
    found, queries = own.flatten().unique_consecutive(return_counts=True)
    row, start = found // length, found % length
    stop = (queries.cumsum(0) - 1) % size + 1 + number * size
    unseen = start.where(row.diff(prepend=row.new_tensor([-1])) > 0, 0)
    lengths = torch.stack([torch.stack([0 * queries, queries], 1), torch.stack([unseen, stop - start], 1)]).flatten(1)
    return pad(lengths[:, lengths.any(0)].cumsum(1), (1, 0)).int()
