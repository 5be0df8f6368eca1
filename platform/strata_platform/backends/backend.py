"""What the client asks of a place that runs can go to, and what all such places share."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from strata_platform.errors import BackendError, Unreachable
from strata_platform.estimate import GPUS, Gpu
from strata_platform.estimate.gpus import gpu_by_name
from strata_platform.run_layout import RunLayout
from strata_platform.runs import Event, LogLine, MetricPoint, Outputs, Run, Stage
from strata_platform.spec import RunSpec

Pause = Callable[[], None]
"""Called when there is nothing new, until there may be."""

RETRY_SECONDS = 300.0
"""How long those who follow a run bear that its backend does not answer."""

log = logging.getLogger(__name__)


class Retry:
    """Bears that a backend does not answer, as it does while parts of a cluster start anew."""

    def __init__(self) -> None:
        self._since: float | None = None

    def failed(self, error: Unreachable) -> None:
        """Say it once. Raises `error` when it has been so for RETRY_SECONDS."""
        if self._since is None:
            log.warning("%s; trying again", error)
            self._since = time.monotonic()
        if time.monotonic() - self._since > RETRY_SECONDS:
            raise error

    def succeeded(self) -> None:
        """It has answered."""
        self._since = None


class Backend(Protocol):
    """Local processes, or Flyte. Every method but `submit` raises RunNotFound for a name that no run has."""

    name: str

    def gpu(self, spec: RunSpec) -> Gpu | None:
        """The kind of GPU that the run would get; None when it gets none, or one that nothing is known of."""

    def submit(self, spec: RunSpec) -> Run:
        """Start the run, or continue the one whose folder it is. Raises RunExists when it goes on already."""

    def get(self, name: str) -> Run:
        """The run as it is now."""

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """All lines so far; with `pause` also those to come, until the run ends."""

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points so far in the order that they were written; with `pause` also those to come."""

    def events(self, name: str) -> list[Event]:
        """What happened so far, the oldest first."""

    def cancel(self, name: str) -> None:
        """Ask the run to end; does not wait for it. Nothing happens to a run that has ended."""

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Where the outputs of a run that succeeded are; with `to`, in that folder, copied there."""

    def list(self) -> list[Run]:
        """All runs, the newest first."""


def find_gpu(name: str) -> Gpu | None:
    """The kind of GPU that is called so; says that nothing is known of one that is not in the table."""
    found = gpu_by_name(name)
    if found is None:
        log.warning("whether the run fits is not known: %s is not among %s", name, ", ".join(GPUS))
    return found


def destinations(to: Path) -> dict[str, Path]:
    """The places of outputs in the folder `to`, which is made. Raises BackendError when it is none, or has them."""
    found = RunLayout(to).outputs
    there = [str(place) for place in found.values() if place.exists()]
    if there:
        raise BackendError(f"{', '.join(there)} is there already; give another folder", status=409, reason="Exists")
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(f"{to} cannot be made a folder: {error.strerror}; give another", status=409) from error
    return found


def parse_points(values: Iterable[Mapping[str, Any]]) -> Iterator[MetricPoint]:
    """As points. What is not one is left out, and the first is told of."""
    left_out = False
    for item in values:
        try:
            point = MetricPoint.of(item)
        except TypeError as error:
            if not left_out:
                log.warning("metrics that are of another version, or torn, are left out: %s", error)
            left_out = True
        else:
            yield point


def with_progress(run: Run, last: Sequence[MetricPoint]) -> Run:
    """`run` with what its last points tell of where it is, and when its steps will be done."""
    if not last:
        return run
    eta = None
    if run.stage is Stage.TRAINING and run.steps is not None:
        eta = (run.steps - last[-1].step) * statistics.median(point.step_seconds for point in last[-20:])
    newest = last[-1]
    return replace(run, step=newest.step, loss=newest.loss, tokens_per_second=newest.tokens_per_second, eta=eta)
