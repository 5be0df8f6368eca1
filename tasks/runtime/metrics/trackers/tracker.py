"""The interface of trackers, and the names of values that all of them use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from strata_platform.redact import redacted
from strata_platform.runs import EvaluationPoint, MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.folder import RunFolder

# Fields that tell when a value was measured.
_WHEN = ("step", "attempt", "time")


class Values(NamedTuple):
    """Values of one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    """By name, such as `train/loss`."""


class Tracker(Protocol):
    """Stores a run's values. Its methods raise whatever goes wrong."""

    def log(self, values: Sequence[Values]) -> None:
        """Store values, in order."""

    def close(self, *, complete: bool) -> None:
        """No values follow; `complete` if the run has finished."""


def values_of(point: MetricPoint) -> Values:
    """A point's values, named after the fields of the metrics file: `train/loss` is `loss`."""
    known = asdict(point)
    known |= known.pop("metrics")
    named = {f"train/{name}": value for name, value in known.items() if name not in _WHEN and value is not None}
    return Values(point.step, point.time, named)


def evaluation_of(point: EvaluationPoint) -> Values:
    """The values of an evaluation: `eval/loss`, and its metrics beside it."""
    named = {"loss": point.loss, **point.metrics, "seconds": point.seconds}
    return Values(point.step, point.time, {f"eval/{name}": value for name, value in named.items()})


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """The spec with redacted URLs, which may contain signatures."""
    return dict(json.loads(redacted(spec.model_dump_json())))


def identity(folder: RunFolder, name: str) -> Path:
    """The file with the tracker's id of this run, so that every attempt continues the same one."""
    return folder.root / f"{name}.id"
