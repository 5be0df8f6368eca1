"""Where metrics go beside the JSON lines: a file for each name in `tracking.report_to`, and Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from strata_platform.runs import MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers.channel import Channel
from tasks.runtime.metrics.trackers.tracker import Tracker, Values, values_of
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from tasks.runtime.metrics.trackers.prometheus import Prometheus

# What it takes to be told, of which one must be set. Addresses and keys are the environment's, never the spec's.
_ENVIRONMENT = {
    "mlflow": {"MLFLOW_TRACKING_URI": "the address of the server"},
    "wandb": {"WANDB_API_KEY": "your key", "WANDB_MODE": "'offline', or 'online' after `wandb login`"},
}


class Trackers:
    """Those that the spec names, told of every step by a thread each: training waits for none of them."""

    def __init__(self, spec: RunSpec, folder: RunFolder, *, done: int) -> None:
        """Training goes on after step `done`."""
        self._channels = [
            Channel(name, partial(_open, name, spec, folder, done)) for name in dict.fromkeys(spec.tracking.report_to)
        ]

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Tell of steps, in order."""
        for channel in self._channels:
            channel.log([values_of(point) for point in points])

    def note(self, values: Mapping[str, float], *, step: int) -> None:
        """Tell of the run as such, when `step` is done; names are such as `warmup/planned`."""
        for channel in self._channels:
            channel.log([Values(step, time.time(), dict(values))])

    def close(self, *, complete: bool) -> None:
        """No step follows; with `complete` the last one was the run's last. Warns of what could not be told."""
        for channel in self._channels:
            channel.close(complete=complete)


def require_trackers(spec: RunSpec) -> None:
    """Raises ValueError when one that the spec names is not installed, or does not know whom to tell."""
    require_tracker_packages(spec)
    for name in spec.tracking.report_to:
        variables = _ENVIRONMENT.get(name, {})
        if variables and not any(os.environ.get(variable) for variable in variables):
            advice = " or ".join(f"{variable} to {value}" for variable, value in variables.items())
            raise ValueError(f"tracking.report_to has {name!r}: set the environment variable {advice}, or take it out")


def require_planned_trackers(spec: RunSpec) -> None:
    """The part of `require_trackers` that a pod can answer for the pods that train.

    With `resources.pod_template` they may have other environment variables. The image, and so the packages, are the
    same.
    """
    (require_trackers if spec.resources.pod_template is None else require_tracker_packages)(spec)


def require_tracker_packages(spec: RunSpec) -> None:
    """Raises ValueError when one that the spec names is not installed."""
    for name in spec.tracking.report_to:
        found = find_spec(name)
        # A folder of that name in the working directory, which some of them leave there, is found without an origin.
        if found is None or found.origin is None:
            package = f"'strata[{name}]'" if name in _ENVIRONMENT else name
            raise ValueError(
                f"tracking.report_to has {name!r}, which is not installed; pip install {package}, or take it out"
            )


def serve_prometheus(spec: RunSpec, processes: Processes, warmup: Callable[[], Mapping[str, Any]]) -> Prometheus | None:
    """This process's endpoint, if `tracking.prometheus_port` asks for one."""
    if spec.tracking.prometheus_port is None:
        return None
    from tasks.runtime.metrics.trackers.prometheus import Prometheus

    return Prometheus(spec, processes, warmup)


def _open(name: str, spec: RunSpec, folder: RunFolder, done: int) -> Tracker:
    """Loads the file of that name, and the package; those of the others are not loaded."""
    tracker: Tracker = import_module(f"{__name__}.{name}").begin(spec, folder, done)
    return tracker
