"""Curves before drawing: downsampling, smoothing, and axes with round ticks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, log10, nan

from tasks.runtime.report.numbers import TINY, drawable, scale

MAX_POINTS = 1000
STEP_INTERVALS, VALUE_INTERVALS = 5, 4
"""About how many intervals an axis of steps, or of values, is divided into by its ticks."""


def downsample(values: Sequence[float]) -> list[int]:
    """Ascending indices of at most `MAX_POINTS` values to draw, with the first, last, smallest and largest value.

    The series is divided into equal buckets. Each keeps its minimum and its maximum, so spikes survive, and one value
    that cannot be drawn, if it has any, so gaps survive.
    """
    n = len(values)
    if n <= MAX_POINTS:
        return list(range(n))
    buckets = (MAX_POINTS - 2) // 2
    kept = {0, n - 1}
    for bucket in range(buckets):
        indices = range(bucket * n // buckets, (bucket + 1) * n // buckets)
        finite = [index for index in indices if drawable(values[index])]
        if finite:
            kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
        if len(finite) < len(indices):
            kept.add(next(index for index in indices if not drawable(values[index])))
    return sorted(kept)


def smoothing_radius(n: int) -> int:
    """Radius of `smooth` for a series of `n` values: 2 % of them; 0 for a short series."""
    return n // 50


def smooth(values: Sequence[float], radius: int) -> list[float]:
    """Moving mean over `radius` values on each side; values that cannot be drawn are ignored and stay gaps.

    At the start the window shrinks symmetrically: otherwise the steep first steps of a loss would be drawn too low.
    """
    good = [drawable(value) for value in values]
    sums = [0.0, *accumulate(value if ok else 0.0 for value, ok in zip(values, good, strict=True))]
    counts = [0, *accumulate(good)]
    means = []
    for index, ok in enumerate(good):
        first, end = index - min(index, radius), min(index + min(index, radius) + 1, len(values))
        means.append((sums[end] - sums[first]) / (counts[end] - counts[first]) if ok else nan)
    return means


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `ticks[0]` to `end`, with a label for each tick."""

    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    end: float

    def at(self, value: float) -> float:
        """Position of `value` on the axis, 0 to 1."""
        low = self.ticks[0]
        return (value - low) / (self.end - low)


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """Axis that covers `values` (drawable, at least one) and ends at round ticks."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(TINY, 1e-9 * max(abs(low), abs(high))):
        margin = max(0.1 * abs(high), 0.1)
        low, high = (low - margin, high + margin) if not from_zero else (0.0, 1.0)
    step = _round_step((high - low) / VALUE_INTERVALS)
    return _axis(range(floor(low / step), ceil(high / step) + 1), step, end=None)


def step_axis(last: int) -> Axis:
    """Axis from step 0 to exactly `last`, with ticks at round steps."""
    step = max(1.0, _round_step(last / STEP_INTERVALS))
    return _axis(range(floor(last / step) + 1), step, end=float(last))


def _axis(multiples: range, step: float, end: float | None) -> Axis:
    ticks = tuple(multiple * step for multiple in multiples)
    divisor, suffix = scale(max(abs(ticks[0]), abs(ticks[-1])))
    decimals = max(0, ceil(-log10(step / divisor) - 1e-9))
    # A step of 2.5 needs one decimal more than its power of ten.
    decimals += round(step / divisor, decimals) != round(step / divisor, decimals + 1)
    labels = tuple(f"{tick / divisor:,.{decimals}f}{suffix}" if tick else "0" for tick in ticks)
    return Axis(ticks, labels, ticks[-1] if end is None else end)


def _round_step(least: float) -> float:
    """The smallest number >= `least` that is 1, 2, 2.5, 5 or 10 times a power of ten."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))
