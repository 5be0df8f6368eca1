"""What runs have held: GPU hours and their price, by project and owner, over all attempts, however they ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata_platform.estimate.gpus import gpu_kind
from strata_platform.runs import Held, Run

if TYPE_CHECKING:
    from strata_platform.estimate import Prices

CPU = "cpu"
"""The kind of device of runs without a GPU."""
UNNAMED = "unnamed GPU"
"""The kind of GPUs of runs whose spec does not name their model."""


@dataclass(slots=True)
class Used:
    """What the runs of one owner in one project have held."""

    project: str
    owner: str
    runs: int = 0
    unknown: int = 0
    """Submissions of which it is not known what they held."""
    hours: dict[str, float] = field(default_factory=dict)
    """Hours of GPUs, by model, and of processes on CPUs as `cpu`."""
    cost: float | None = None
    """Of the GPU hours; None if a GPU model has no price."""
    currency: str = ""

    @property
    def gpu_hours(self) -> float:
        """Over all models."""
        return sum(hours for kind, hours in self.hours.items() if kind != CPU)


def used_by_owner(
    project: str, submissions: Iterable[tuple[Run, Sequence[Held] | None]], prices: Prices | None
) -> list[Used]:
    """What each owner's runs have held, the most GPU hours first. `submissions`: each with what it held, if known."""
    found: dict[str, Used] = {}
    names: set[tuple[str, str]] = set()
    for run, held in submissions:
        used = found.setdefault(run.owner, Used(project, run.owner))
        used.runs += (run.owner, run.name) not in names
        names.add((run.owner, run.name))
        used.unknown += held is None
        for each in held or ():
            kind = CPU if each.gpu is None else gpu_kind(each.gpu) or each.gpu or UNNAMED
            used.hours[kind] = used.hours.get(kind, 0.0) + each.seconds * each.processes / 3600
    for used in found.values():
        each_price = {kind: None if prices is None else prices.of(kind) for kind in used.hours if kind != CPU}
        known = {kind: price for kind, price in each_price.items() if price is not None}
        if len(known) == len(each_price):
            used.cost = sum(price.amount * used.hours[kind] for kind, price in known.items())
            used.currency = prices.currency if prices else ""
    return sorted(found.values(), key=lambda used: (-used.gpu_hours, used.owner))
