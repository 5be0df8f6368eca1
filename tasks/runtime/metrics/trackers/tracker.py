"""What a tracker is, and the names that all of them use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from strata_platform.redact import redacted
from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.folder import RunFolder

# What says when a value was, and is not a value itself.
_WHEN = ("step", "attempt", "time")


class Values(NamedTuple):
    """What there is to tell at a step."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    """By names such as `train/loss`."""


class Tracker(Protocol):
    """Keeps a run's values somewhere. Whatever goes wrong there, it raises."""

    def log(self, values: Sequence[Values]) -> None:
        """Keep them, in order."""

    def close(self, *, complete: bool) -> None:
        """None follow; with `complete` the run is done."""


def values_of(point: MetricPoint) -> Values:
    """What is known of a step, by the names of the metrics file: `train/loss` is its `loss`."""
    known = asdict(point)
    known |= known.pop("metrics")
    told = {f"train/{name}": value for name, value in known.items() if name not in _WHEN and value is not None}
    return Values(point.step, point.time, told)


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """The spec for others to see: URLs without what may be a signature."""
    return dict(json.loads(redacted(spec.model_dump_json())))


def identity(folder: RunFolder, name: str) -> Path:
    """Where the run notes what the tracker `name` knows it by, so that every attempt continues the same one."""
    return folder.root / f"{name}.id"
