"""How many rows the loss computes logits of: those that predict a label, rounded up.

The host knows the labels before the GPU does, so it can say how many rows the head need not see, without waiting. Few
distinct counts keep the allocator's memory from falling to pieces, and let a warm-up plan for all of them.
"""

from __future__ import annotations

# Distinct counts of a batch: eighths of its positions.
_PARTS = 8
# Triton compiles another kernel for a number of rows that is no multiple of 16.
_ROWS = 16


def rounded_targets(count: int, positions: int) -> int | None:
    """`max_targets` for a batch of so many positions, `count` of which predict a label: None for all of them.

    >>> rounded_targets(500, 1024), rounded_targets(513, 1024), rounded_targets(900, 1024)
    (512, 640, None)
    """
    step = _step(positions)
    kept = max(1, -(-count // step)) * step
    return kept if kept < positions else None


def rounded_counts(positions: int) -> tuple[int | None, ...]:
    """All that `rounded_targets` gives for a batch of so many positions; None is the first."""
    return (None, *range(_step(positions), positions, _step(positions)))


def _step(positions: int) -> int:
    return -(-positions // (_PARTS * _ROWS)) * _ROWS
