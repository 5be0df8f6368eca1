"""Packing of documents into rows: best-fit decreasing.

Attention does not cross document boundaries, because position ids restart at each document: without an attention mask
and a cache, transformers builds a block-diagonal mask from restarting position ids.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pack(lengths: Ints, capacity: int) -> Ints:
    """Assign each document to a row by best-fit decreasing; rows are numbered in the order they are opened.

    Documents are placed from long to short, each into the fullest row with enough free space. All documents of one
    length are placed at once: the best-fitting row takes as many of them as fit, because it stays the best fit. So the
    time is that of sorting, not of a search per document. The result needs at most 11/9 of the optimal number of rows.

    lengths: [D], int64, each between 1 and `capacity`. Returns [D], int64.

    >>> pack(np.array([5, 3, 4, 2, 2]), 8).tolist()
    [0, 0, 1, 1, 1]
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    order = np.argsort(-lengths, kind="stable")
    rows = np.empty(lengths.size, dtype=np.int64)
    free_sizes: list[int] = []  # free tokens of the open rows, sorted, without duplicates
    open_rows: dict[int, Ints] = {}
    row_count = 0

    def return_rows(free: int, numbers: Ints) -> None:
        if free and numbers.size:
            if free not in open_rows:
                insort(free_sizes, free)
            open_rows[free] = np.concatenate([open_rows.get(free, numbers[:0]), numbers])

    for documents in _runs(order, lengths):
        length = int(lengths[documents[0]])
        while documents.size:
            at = bisect_left(free_sizes, length)
            if at < len(free_sizes):
                free = free_sizes.pop(at)
                candidates = open_rows.pop(free)
            else:
                free = capacity
                needed = -(-documents.size // (capacity // length))
                candidates = np.arange(row_count, row_count + needed)
                row_count += needed
            per_row = free // length
            full, rest = divmod(min(documents.size, per_row * candidates.size), per_row)
            used = full + (rest > 0)
            rows[documents[: full * per_row + rest]] = np.repeat(candidates[:used], per_row)[: full * per_row + rest]
            documents = documents[full * per_row + rest :]
            return_rows(free - per_row * length, candidates[:full])
            return_rows(free - rest * length, candidates[full:used])
            return_rows(free, candidates[used:])
    return rows


def _runs(order: Ints, lengths: Ints) -> list[Ints]:
    """`order` split where the length changes."""
    if not order.size:
        return []
    return np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)
