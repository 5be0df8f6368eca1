"""Buckets for `max_targets`, the number of rows whose logits the loss computes: rows with a label, rounded up.

The host knows the labels before the GPU does, so it can bound the number of rows without synchronization. With a few
buckets instead of every number, the allocator's memory does not fragment, and a warm-up plan can cover all of them.
"""

from __future__ import annotations

# Number of buckets: multiples of an eighth of a batch's positions.
_BUCKETS = 8
# Bucket granularity: Triton specializes kernels on divisibility of the row count by 16.
_MULTIPLE = 16


def row_bucket(targets: int, positions: int) -> int | None:
    """`max_targets` for a batch in which `targets` of the `positions` predict a label; None for all positions.

    >>> row_bucket(500, 1024), row_bucket(513, 1024), row_bucket(900, 1024)
    (512, 640, None)
    """
    step = _step(positions)
    bucket = max(1, -(-targets // step)) * step
    return bucket if bucket < positions else None


def row_buckets(positions: int) -> tuple[int | None, ...]:
    """All results of `row_bucket` for a batch of `positions`; None is the first."""
    return (None, *range(_step(positions), positions, _step(positions)))


def _step(positions: int) -> int:
    return -(-positions // (_BUCKETS * _MULTIPLE)) * _MULTIPLE
