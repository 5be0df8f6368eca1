"""What runs have used: GPU hours and their price, by project and owner, from the records of complete runs.

A record counts the seconds of the steps that the model was trained with, times the run's processes. Starts, steps that
were repeated after a restart, evaluation and runs without a record are not in it: a lower bound of what was held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata_platform.estimate.gpus import gpu_kind
from strata_platform.runs import Run

if TYPE_CHECKING:
    from strata_platform.estimate import Prices

CPU = "cpu"
"""The kind of device of runs without a GPU."""


@dataclass(slots=True)
class Used:
    """What the runs of one owner in one project have used."""

    project: str
    owner: str
    runs: int = 0
    without_record: int = 0
    """Runs that have not ended, or not as complete; what they used is not known."""
    hours: dict[str, float] = field(default_factory=dict)
    """Hours of processes that trained, by GPU model, or `cpu`."""
    cost: float | None = None
    """Of the GPU hours; None if a GPU model has no price."""
    currency: str = ""

    @property
    def gpu_hours(self) -> float:
        """Over all models."""
        return sum(hours for kind, hours in self.hours.items() if kind != CPU)


def used_by_owner(
    project: str, runs: Iterable[tuple[Run, Mapping[str, Any] | None]], prices: Prices | None
) -> list[Used]:
    """What each owner's runs have used, the most GPU hours first. `runs`: each with its record, if it has one."""
    found: dict[str, Used] = {}
    for run, record in runs:
        used = found.setdefault(run.owner, Used(project, run.owner))
        used.runs += 1
        if record is None:
            used.without_record += 1
            continue
        device = str(record["device"])
        kind = CPU if device.startswith("CPU") else gpu_kind(device) or device
        used.hours[kind] = used.hours.get(kind, 0.0) + record["seconds"] * record["world_size"] / 3600
    for used in found.values():
        each = {kind: None if prices is None else prices.of(kind) for kind in used.hours if kind != CPU}
        known = {kind: price for kind, price in each.items() if price is not None}
        if len(known) == len(each):
            used.cost = sum(price.amount * used.hours[kind] for kind, price in known.items())
            used.currency = prices.currency if prices else ""
    return sorted(found.values(), key=lambda used: (-used.gpu_hours, used.owner))
