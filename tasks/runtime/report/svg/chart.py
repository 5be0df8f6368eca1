"""A chart as inline SVG whose text keeps its size at any width.

The outer SVG has no view box, so its coordinates are CSS pixels and percentages and its labels do not scale. The curves
are in an inner SVG that stretches with the figure. There are no scripts: tooltips are `<title>` elements on vertical
bands of the plot, few enough to keep the page small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasks.runtime.report.markup import Html, element, join
from tasks.runtime.report.numbers import count, drawable, number
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


def figure(chart: Chart) -> Html:
    """The chart with title, last value, and a note on steps whose value cannot be drawn."""
    finite = [value for value in chart.values if drawable(value)]
    missing = [step for step, value in zip(chart.steps, chart.values, strict=True) if not drawable(value)]
    last = number(chart.values[-1], chart.digits)
    caption = element(
        "figcaption",
        element("h3", chart.title, element("span", chart.unit, class_="unit") if chart.unit else None),
        element("span", element("span", "last", class_="unit"), f" {last}", class_="last"),
    )
    radius = smoothing_radius(len(chart.values)) if chart.smoothed else 0
    return element(
        "figure",
        caption,
        _legend(chart, radius) if chart.smoothed else None,
        _svg(chart, finite, radius) if finite else None,
        element("p", _missing(missing), class_="note") if missing else None,
        class_="chart wide" if chart.smoothed else "chart",
    )


def _missing(steps: list[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", \u2026" if len(steps) > 5 else "")
    return f"{count(len(steps), 'step')} without a finite value, shown as a gap: {shown}"


def _legend(chart: Chart, radius: int) -> Html:
    entries = [("raw", "each step")]
    if radius:
        entries.append(("curve", f"mean of {2 * radius + 1:,} steps"))
    if chart.marks:
        entries.append(("mark", "evaluation"))
    if chart.restarts:
        entries.append(("restart", "restart"))
    return element(
        "ul",
        *(element("li", element("span", class_=f"key {kind}"), label) for kind, label in entries),
        class_="legend",
    )


def _svg(chart: Chart, finite: list[float], radius: int) -> Html:
    marks = [mark for mark in chart.marks if drawable(mark.value)]
    x = step_axis(max(1, chart.steps[-1], *(mark.step for mark in marks)))
    y = value_axis([*finite, *(mark.value for mark in marks)], from_zero=chart.from_zero)
    means = smooth(chart.values, radius) if radius else None
    curves = [("raw" if chart.smoothed else "curve", chart.values)] + ([("curve", means)] if means else [])
    return element(
        "svg",
        *_grid(x, y),
        element(
            "svg",
            *(path for kind, values in curves for path in _paths(chart.steps, values, x, y, kind)),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
        ),
        *_bands(chart, means, x, y),
        *(_restart(step, x) for step in chart.restarts),
        *(_mark(chart, mark, x, y) for mark in marks),
        role="img",
        aria_label=_aria_label(chart, finite),
    )


def _aria_label(chart: Chart, finite: list[float]) -> str:
    parts = [
        f"{chart.title} over {count(len(chart.steps), 'step')}",
        f"final value {number(chart.values[-1], chart.digits)} {chart.unit}".rstrip(),
        f"lowest {number(min(finite), chart.digits)}, highest {number(max(finite), chart.digits)}",
        *(f"{mark.label} {number(mark.value, chart.digits)}" for mark in chart.marks),
        *([f"{count(len(chart.restarts), 'restart')}"] if chart.restarts else []),
    ]
    return "; ".join(parts)


def percent(share: float) -> str:
    """A position, 0 to 1, as a percentage for SVG."""
    assert -1e-6 <= share <= 1 + 1e-6, share
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _grid(x: Axis, y: Axis) -> list[Html]:
    drawn = []
    for tick, label in zip(y.ticks, y.labels, strict=True):
        place = percent(1 - y.at(tick))
        drawn.append(element("line", x1="0", x2="100%", y1=place, y2=place, class_="grid"))
        drawn.append(element("text", label, x="-8", y=place, dy="0.33em", class_="y"))
    for tick, label in zip(x.ticks, ("step 0", *x.labels[1:]), strict=True):
        drawn.append(element("text", label, x=percent(x.at(tick)), y="100%", dy="1.6em", class_="x"))
    return drawn


def _paths(steps: Sequence[int], values: Sequence[float], x: Axis, y: Axis, kind: str) -> list[Html]:
    """Paths of the curve between its gaps, and a dot for every point without a neighbor to connect to."""
    runs: list[list[str]] = [[]]
    for index in downsample(values):
        if drawable(values[index]):
            runs[-1].append(f"{round(WIDTH * x.at(steps[index]))} {round(HEIGHT * (1 - y.at(values[index])))}")
        elif runs[-1]:
            runs.append([])
    lines = "".join("M" + "L".join(run) for run in runs if len(run) > 1)
    dots = "".join(f"M{run[0]}h0" for run in runs if len(run) == 1)
    return [element("path", d=d, class_=class_) for d, class_ in ((lines, kind), (dots, "dots")) if d]


def _bands(chart: Chart, means: list[float] | None, x: Axis, y: Axis) -> list[Html]:
    """Vertical bands whose tooltip shows the value at that step."""
    indices = [index for index, value in enumerate(chart.values) if drawable(value)]
    n = min(MAX_BANDS, len(indices))
    chosen = [indices[(2 * band + 1) * len(indices) // (2 * n)] for band in range(n)]
    places = [x.at(chart.steps[index]) for index in chosen]
    edges = [0.0, *((left + right) / 2 for left, right in pairwise(places)), 1.0]
    drawn = []
    for index, place, (left, right) in zip(chosen, places, pairwise(edges), strict=True):
        value, at = chart.values[index], percent(place)
        mean = f" (mean {number(means[index], chart.digits)})" if means else ""
        drawn.append(
            element(
                "g",
                element("title", f"step {chart.steps[index]:,}: {number(value, chart.digits)} {chart.unit}{mean}"),
                element("rect", x=percent(left), width=percent(right - left), height="100%"),
                element("line", x1=at, x2=at, y2="100%"),
                element("circle", cx=at, cy=percent(1 - y.at(value)), r="3.5"),
                class_="band",
            )
        )
    return drawn


def _restart(step: int, x: Axis) -> Html:
    at = percent(x.at(step))
    title = element("title", f"restart: a new attempt begins with step {step:,}")
    # The second line is a wide invisible target for the pointer.
    lines = join(element("line", x1=at, x2=at, y2="100%", class_=kind) for kind in ("restart", "target"))
    return element("g", title, lines)


def _mark(chart: Chart, mark: Mark, x: Axis, y: Axis) -> Html:
    title = element("title", f"{mark.label}: {number(mark.value, chart.digits)} {chart.unit}")
    return element("circle", title, cx=percent(x.at(mark.step)), cy=percent(1 - y.at(mark.value)), r="5", class_="mark")
