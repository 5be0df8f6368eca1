"""Several sources as one: which source a row of a run comes from.

The source of a row is a pure function of its position in the run. Source k takes n w / W, rounded, of the first n
positions that the sources before it leave, with its weight w and the weights W of all but those. So after any number of
rows, each source is within a few rows of its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

from tasks.runtime.data.prepared_manifest import Manifest, Split
from tasks.runtime.run_folder.record import SourceShare


class RowOrder(Protocol):
    """An endless stream of row indices."""

    def __getitem__(self, position: int) -> int:
        """The row at a position of the run."""


class Draw:
    """Which source each position of a run draws from.

    weights: of the sources, above 0, of any scale. Equal to their numbers of rows, they draw each row once an epoch.

    >>> draw = Draw([0.5, 0.3, 0.2])
    >>> [draw.source(position)[0] for position in range(10)]
    [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
    >>> draw.counts(10_000)
    [5000, 3000, 2000]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # As written in decimals, and exact: a float product of a large position would draw a row twice or never.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._left = list(accumulate(reversed(self._weights)))[::-1]

    def source(self, position: int) -> tuple[int, int]:
        """Number of the source at a position, and how many rows it has given before."""
        for number in range(len(self._weights)):
            before = self._taken(number, position)
            if self._taken(number, position + 1) > before:
                return number, before
            position -= before
        raise AssertionError("the last source takes every position that is left")

    def counts(self, positions: int) -> list[int]:
        """Rows of each source among the first positions."""
        found = []
        for number in range(len(self._weights)):
            found.append(self._taken(number, positions))
            positions -= found[-1]
        return found

    @property
    def shares(self) -> list[float]:
        """The share of each source, 0 to 1."""
        return [weight / sum(self._weights) for weight in self._weights]

    def _taken(self, number: int, positions: int) -> int:
        weight, left = self._weights[number], self._left[number]
        return (2 * positions * weight + left) // (2 * left)


class MixedRows:
    """Endless stream of row indices over several sources, whose rows follow each other in one split.

    orders: the stream of each source. first: the index of the first row of each.
    """

    def __init__(self, draw: Draw, orders: Sequence[RowOrder], first: Sequence[int]) -> None:
        self._draw, self._orders, self._first = draw, orders, first

    def __getitem__(self, position: int) -> int:
        number, index = self._draw.source(position)
        return self._first[number] + self._orders[number][index]


def draw_of(manifest: Manifest, weights: Sequence[float | None]) -> Draw:
    """The draw from the sources that a run trains on. weights: those of `data.sources`; None for a source's size."""
    trained = manifest.trained
    if not weights:
        weights = [None] * len(trained)
    return Draw([source.train.rows if w is None else w for source, w in zip(trained, weights, strict=True)])


def source_shares(
    manifest: Manifest, weights: Sequence[float | None], spans: Sequence[tuple[int, int]]
) -> tuple[SourceShare, ...]:
    """What a run reads of each source; empty for a single one. spans: of its positions, each (first, last + 1).

    The manifest has the counts of all rows.
    """
    if not manifest.sources:
        return ()
    draw = draw_of(manifest, weights)
    counts = [draw.counts(last) for _, last in spans], [draw.counts(first) for first, _ in spans]
    until, before = (map(sum, zip(*found, strict=True)) for found in counts)
    epochs = [(u - b) / source.train.rows for u, b, source in zip(until, before, manifest.trained, strict=True)]
    drawn = iter(zip(draw.shares, epochs, strict=True))
    rows, tokens = (
        sum(times * getattr(source.train, name) for times, source in zip(epochs, manifest.trained, strict=True))
        for name in ("rows", "tokens")
    )
    return tuple(
        _share(source.source, source.train, *next(drawn), rows, tokens)
        if source.is_trained
        else SourceShare(source=source.source, weight=None)
        for source in manifest.sources
    )


def _share(source: str, split: Split, weight: float, epochs: float, rows: float, tokens: float) -> SourceShare:
    return SourceShare(
        source=source,
        weight=weight,
        rows=round(epochs * split.rows),
        row_share=epochs * split.rows / rows,
        samples=round(epochs * split.samples),
        tokens=round(epochs * split.tokens),
        token_share=epochs * split.tokens / tokens,
        epochs=epochs,
    )
