"""Comparison of the runs of a sweep: a table, best run first, and a plot of the loss for each swept field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.runtime.report.numbers import drawable, loss, number
from tasks.runtime.report.rendering import render
from tasks.runtime.report.sections import Table
from tasks.runtime.report.svg.chart import Dot, Drawing, Figure, Tick, percent, y_ticks
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
    rows = [(trial.name, *map(str, trial.values), *_shown(trial)) for trial in trials]
    return render(
        "comparison.html",
        name=name,
        finished=len(finished),
        total=len(trials),
        runs=Table(("Run", *fields, *Trial.MEASURED), rows),
        figures=[_scatter(field, index, finished) for index, field in enumerate(fields) if finished],
    )


def _shown(trial: Trial) -> tuple[str, ...]:
    if trial.record is None:
        return ("did not finish", "", "", "")
    after, last, rate, memory = trial.measured()
    return loss(after), loss(last), number(rate or 0.0), f"{memory:.1f}"


def _scatter(field: str, index: int, trials: Sequence[Trial]) -> Figure:
    """Scatter plot with a dot for each run: the value of one field on x, the loss on y."""
    values = list(dict.fromkeys(str(trial.values[index]) for trial in trials))
    values.sort(key=_order)
    losses = [trial.loss for trial in trials if trial.loss is not None]
    y = value_axis(losses, from_zero=False)
    across = {value: percent((place + 0.5) / len(values)) for place, value in enumerate(values)}
    drawing = Drawing(
        label=f"loss by {field}: lowest {loss(min(losses))}, highest {loss(max(losses))}",
        y_ticks=y_ticks(y),
        x_ticks=[Tick(at, value) for value, at in across.items()],
        dots=[
            Dot(across[str(trial.values[index])], percent(1 - y.at(found)), f"{trial.name}: {loss(found)}")
            for trial, found in zip(trials, losses, strict=True)
        ],
    )
    return Figure(field, "loss", drawing)


def _order(value: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then texts."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
