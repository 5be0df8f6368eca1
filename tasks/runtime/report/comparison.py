"""Comparison of the runs of a sweep: a table, best run first, and a plot of the loss for each swept field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.runtime.report.markup import Html, element, join
from tasks.runtime.report.numbers import drawable, loss, number
from tasks.runtime.report.sections import table
from tasks.runtime.report.style import SCOPE, STYLE
from tasks.runtime.report.svg.chart import percent
from tasks.runtime.report.svg.series import value_axis
from tasks.runtime.run_folder.record import CompletionRecord


@dataclass(frozen=True)
class Trial:
    """A run of a sweep: its name, its values of the swept fields, and its record if it finished."""

    MEASURED: ClassVar[tuple[str, ...]] = ("validation loss", "train loss", "tokens/s", "peak GiB")

    name: str
    values: tuple[Any, ...]
    record: CompletionRecord | None

    @property
    def loss(self) -> float | None:
        """Validation loss, or without one the loss of the last step; None for a run that did not finish."""
        if self.record is None:
            return None
        after = self.record.eval_loss_after
        found = self.record.train_loss if after is None else after
        return found if drawable(found) else None

    def measured(self) -> tuple[float | None, ...]:
        """Values in the order of MEASURED."""
        if self.record is None:
            return (None,) * len(self.MEASURED)
        record = self.record
        return record.eval_loss_after, record.train_loss, record.tokens_per_second, record.peak_memory_bytes / 2**30


def render_comparison(name: str, fields: Sequence[str], trials: Sequence[Trial]) -> str:
    """The comparison as HTML for a page such as a Flyte Deck. trials: best first."""
    finished = [trial for trial in trials if trial.loss is not None]
    summary = f"{len(finished)} of {len(trials)} runs finished"
    rows = [(trial.name, *map(str, trial.values), *_shown(trial)) for trial in trials]
    page = element(
        "main",
        element("header", element("h1", name), element("p", summary)),
        element("section", element("h2", "Runs"), table(("Run", *fields, *Trial.MEASURED), rows)),
        *(_plot(field, index, finished) for index, field in enumerate(fields) if finished),
        class_=SCOPE,
    )
    return join((element("style", Html(STYLE)), page))


def _shown(trial: Trial) -> tuple[str, ...]:
    if trial.record is None:
        return ("did not finish", "", "", "")
    after, last, rate, memory = trial.measured()
    return loss(after), loss(last), number(rate or 0.0), f"{memory:.1f}"


def _plot(field: str, index: int, trials: Sequence[Trial]) -> Html:
    """Scatter plot with a dot for each run: the value of one field on x, the loss on y."""
    values = list(dict.fromkeys(str(trial.values[index]) for trial in trials))
    values.sort(key=_order)
    losses = [trial.loss for trial in trials if trial.loss is not None]
    axis = value_axis(losses, from_zero=False)
    across = {value: (place + 0.5) / len(values) for place, value in enumerate(values)}
    drawn: list[Html] = []
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        up = percent(1 - axis.at(tick))
        drawn.append(element("line", x1="0", x2="100%", y1=up, y2=up, class_="grid"))
        drawn.append(element("text", label, x="-8", y=up, dy="0.33em", class_="y"))
    for value, place in across.items():
        drawn.append(element("text", value, x=percent(place), y="100%", dy="1.6em", class_="x"))
    for trial, found in zip(trials, losses, strict=True):
        title = element("title", f"{trial.name}: {loss(found)}")
        x = percent(across[str(trial.values[index])])
        drawn.append(element("circle", title, cx=x, cy=percent(1 - axis.at(found)), r="5", class_="mark"))
    label = f"loss by {field}: lowest {loss(min(losses))}, highest {loss(max(losses))}"
    caption = element("figcaption", element("h3", field, element("span", "loss", class_="unit")))
    return element("figure", caption, element("svg", *drawn, role="img", aria_label=label), class_="chart")


def _order(value: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then texts."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
