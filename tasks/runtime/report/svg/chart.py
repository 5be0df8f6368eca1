"""What a chart shows, and the coordinates of its drawing; `templates/macros.html` has the SVG.

There are no scripts: tooltips are `<title>` elements on vertical bands of the plot, few enough to keep the page small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasks.runtime.report.numbers import counted, drawable, number
from tasks.runtime.report.svg.series import Axis, downsample, smooth, smoothing_radius, step_axis, value_axis

WIDTH, HEIGHT = 4000, 1000
"""Size of the curves' coordinate system; integer coordinates keep paths short."""
MAX_BANDS = 80


@dataclass(frozen=True, slots=True)
class Mark:
    """A single marked value, such as an evaluation loss."""

    step: int
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A series of values by ascending steps, with title, unit and marks."""

    title: str
    unit: str
    steps: Sequence[int]
    values: Sequence[float]
    restarts: Sequence[int] = ()
    """The first step of every attempt after the first."""
    marks: Sequence[Mark] = ()
    from_zero: bool = True
    smoothed: bool = False
    digits: int = 3


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis; positions are percentages of the plot."""

    at: str
    label: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A marked point and its tooltip."""

    x: str
    y: str
    title: str


@dataclass(frozen=True, slots=True)
class Band:
    """A vertical band whose tooltip tells the value at a step, with that point."""

    left: str
    width: str
    x: str
    y: str
    title: str


@dataclass(frozen=True, slots=True)
class Path:
    """The data of an SVG path in a coordinate system of WIDTH by HEIGHT, and its CSS class."""

    d: str
    kind: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The contents of a plot. `label`: the plot in words."""

    label: str
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    paths: Sequence[Path] = ()
    bands: Sequence[Band] = ()
    restarts: Sequence[Tick] = ()
    dots: Sequence[Dot] = ()
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its caption. `drawing`: None if no value can be drawn."""

    title: str
    unit: str
    drawing: Drawing | None
    last: str = ""
    legend: Sequence[tuple[str, str]] = ()
    """CSS class and text of each entry."""
    missing: str = ""
    """A note on steps whose value cannot be drawn."""
    wide: bool = False


def figure(chart: Chart) -> Figure:
    """The chart with title, last value, and a note on steps whose value cannot be drawn."""
    finite = [value for value in chart.values if drawable(value)]
    missing = [step for step, value in zip(chart.steps, chart.values, strict=True) if not drawable(value)]
    radius = smoothing_radius(len(chart.values)) if chart.smoothed else 0
    return Figure(
        chart.title,
        chart.unit,
        _drawing(chart, finite, radius) if finite else None,
        last=number(chart.values[-1], chart.digits),
        legend=_legend(chart, radius) if chart.smoothed else (),
        missing=_missing(missing) if missing else "",
        wide=chart.smoothed,
    )


def _missing(steps: list[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", \u2026" if len(steps) > 5 else "")
    return f"{counted(len(steps), 'step')} without a finite value, shown as a gap: {shown}"


def _legend(chart: Chart, radius: int) -> list[tuple[str, str]]:
    entries = [("raw", "each step")]
    if radius:
        entries.append(("curve", f"mean of {2 * radius + 1:,} steps"))
    if chart.marks:
        entries.append(("mark", "evaluation"))
    if chart.restarts:
        entries.append(("restart", "restart"))
    return entries


def _drawing(chart: Chart, finite: list[float], radius: int) -> Drawing:
    marks = [mark for mark in chart.marks if drawable(mark.value)]
    x = step_axis(max(1, chart.steps[-1], *(mark.step for mark in marks)))
    y = value_axis([*finite, *(mark.value for mark in marks)], from_zero=chart.from_zero)
    means = smooth(chart.values, radius) if radius else None
    curves = [("raw" if chart.smoothed else "curve", chart.values)] + ([("curve", means)] if means else [])
    x_labels = ("step 0", *x.labels[1:])
    return Drawing(
        label=_aria_label(chart, finite),
        y_ticks=y_ticks(y),
        x_ticks=[Tick(percent(x.at(tick)), label) for tick, label in zip(x.ticks, x_labels, strict=True)],
        paths=[path for kind, values in curves for path in _paths(chart.steps, values, x, y, kind)],
        bands=_bands(chart, means, x, y),
        restarts=[
            Tick(percent(x.at(step)), f"restart: a new attempt begins with step {step:,}") for step in chart.restarts
        ],
        dots=[
            Dot(
                percent(x.at(mark.step)),
                percent(1 - y.at(mark.value)),
                f"{mark.label}: {number(mark.value, chart.digits)} {chart.unit}",
            )
            for mark in marks
        ],
    )


def _aria_label(chart: Chart, finite: list[float]) -> str:
    parts = [
        f"{chart.title} over {counted(len(chart.steps), 'step')}",
        f"final value {number(chart.values[-1], chart.digits)} {chart.unit}".rstrip(),
        f"lowest {number(min(finite), chart.digits)}, highest {number(max(finite), chart.digits)}",
        *(f"{mark.label} {number(mark.value, chart.digits)}" for mark in chart.marks),
        *([f"{counted(len(chart.restarts), 'restart')}"] if chart.restarts else []),
    ]
    return "; ".join(parts)


def percent(share: float) -> str:
    """A position, 0 to 1, as a percentage for SVG."""
    assert -1e-6 <= share <= 1 + 1e-6, share
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def y_ticks(y: Axis) -> list[Tick]:
    """The labelled positions of a vertical axis, from the top of the plot."""
    return [Tick(percent(1 - y.at(tick)), label) for tick, label in zip(y.ticks, y.labels, strict=True)]


def _paths(steps: Sequence[int], values: Sequence[float], x: Axis, y: Axis, kind: str) -> list[Path]:
    """Paths of the curve between its gaps, and a dot for every point without a neighbor to connect to."""
    runs: list[list[str]] = [[]]
    for index in downsample(values):
        if drawable(values[index]):
            runs[-1].append(f"{round(WIDTH * x.at(steps[index]))} {round(HEIGHT * (1 - y.at(values[index])))}")
        elif runs[-1]:
            runs.append([])
    lines = "".join("M" + "L".join(run) for run in runs if len(run) > 1)
    dots = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    return [Path(d, class_) for d, class_ in ((lines, kind), (dots, "dots")) if d]


def _bands(chart: Chart, means: list[float] | None, x: Axis, y: Axis) -> list[Band]:
    """Vertical bands whose tooltip shows the value at that step."""
    indices = [index for index, value in enumerate(chart.values) if drawable(value)]
    n = min(MAX_BANDS, len(indices))
    chosen = [indices[(2 * band + 1) * len(indices) // (2 * n)] for band in range(n)]
    places = [x.at(chart.steps[index]) for index in chosen]
    edges = [0.0, *((left + right) / 2 for left, right in pairwise(places)), 1.0]
    bands = []
    for index, place, (left, right) in zip(chosen, places, pairwise(edges), strict=True):
        value = chart.values[index]
        mean = f" (mean {number(means[index], chart.digits)})" if means else ""
        title = f"step {chart.steps[index]:,}: {number(value, chart.digits)} {chart.unit}{mean}"
        bands.append(Band(percent(left), percent(right - left), percent(place), percent(1 - y.at(value)), title))
    return bands
