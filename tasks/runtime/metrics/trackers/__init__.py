"""Trackers: one file for each name in `tracking.report_to`, and Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from strata_platform.runs import EvaluationPoint, MetricPoint
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Resources, Tracking
from tasks.runtime.metrics.trackers.channel import Channel
from tasks.runtime.metrics.trackers.tracker import Tracker, Values, evaluation_of, values_of
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from tasks.runtime.metrics.trackers.prometheus import Prometheus

# Variables that a tracker needs; one of them must be set. Addresses and keys never appear in a spec.
_ENVIRONMENT = {
    "mlflow": {"MLFLOW_TRACKING_URI": "the address of the server"},
    "wandb": {"WANDB_API_KEY": "your key", "WANDB_MODE": "'offline', or 'online' after `wandb login`"},
}


class Trackers:
    """The trackers that the spec names. Each runs in a thread of its own, so training never waits."""

    def __init__(self, spec: RunSpec, folder: RunFolder, *, done: int) -> None:
        """`done`: the step after which training continues."""
        self._channels = [
            Channel(name, partial(_open, name, spec, folder, done)) for name in dict.fromkeys(spec.tracking.report_to)
        ]

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Log steps, in order."""
        for channel in self._channels:
            channel.log([values_of(point) for point in points])

    def log_evaluation(self, point: EvaluationPoint) -> None:
        """Log an evaluation, by names such as `eval/loss`."""
        for channel in self._channels:
            channel.log([evaluation_of(point)])

    def note(self, values: Mapping[str, float], *, step: int) -> None:
        """Log numbers of the run, by names such as `warmup/planned`, at the time of `step`."""
        for channel in self._channels:
            channel.log([Values(step, time.time(), dict(values))])

    def close(self, *, complete: bool) -> None:
        """Flush and close; `complete` if the run has finished. Warns about values that did not arrive."""
        for channel in self._channels:
            channel.close(complete=complete)


def require_trackers(tracking: Tracking) -> None:
    """Raises ValueError if a tracker's package is not installed, or its environment variable is not set."""
    require_tracker_packages(tracking)
    for name in tracking.report_to:
        variables = _ENVIRONMENT.get(name, {})
        if variables and not any(os.environ.get(variable) for variable in variables):
            advice = " or ".join(f"{variable} to {value}" for variable, value in variables.items())
            raise ValueError(f"tracking.report_to has {name!r}: set the environment variable {advice}, or remove it")


def require_planned_trackers(tracking: Tracking, resources: Resources) -> None:
    """Raises ValueError like `require_trackers`, as far as the plan's pod can tell.

    With `resources.pod_template`, training pods may have other environment variables; their image is the same.
    """
    (require_trackers if resources.pod_template is None else require_tracker_packages)(tracking)


def require_tracker_packages(tracking: Tracking) -> None:
    """Raises ValueError if a tracker's package is not installed."""
    for name in tracking.report_to:
        found = find_spec(name)
        # Some trackers leave a folder of their name in the working directory, which is found as a package without an
        # origin.
        if found is None or found.origin is None:
            package = f"'strata[{name}]'" if name in _ENVIRONMENT else name
            raise ValueError(
                f"tracking.report_to has {name!r}, which is not installed; pip install {package}, or remove it"
            )


def serve_prometheus(spec: RunSpec, processes: Processes, warmup: Callable[[], Mapping[str, Any]]) -> Prometheus | None:
    """Start this process's endpoint if `tracking.prometheus_port` is set."""
    if spec.tracking.prometheus_port is None:
        return None
    from tasks.runtime.metrics.trackers.prometheus import Prometheus

    return Prometheus(spec, processes, warmup)


def _open(name: str, spec: RunSpec, folder: RunFolder, done: int) -> Tracker:
    """Import the tracker of that name, and no other."""
    tracker: Tracker = import_module(f"{__name__}.{name}").begin(spec, folder, done)
    return tracker
