"""The interface between the client and a backend, and helpers that the backends share."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strata_platform.errors import BackendError, RunExists, Unreachable
from strata_platform.estimate.gpus import GPUS, Gpu, gpu_by_name
from strata_platform.run_layout import RunLayout
from strata_platform.runs import EvaluationPoint, Event, Held, LogLine, MetricPoint, Outputs, Run, Stage

if TYPE_CHECKING:
    from strata_platform.spec import RunSpec
    from strata_platform.spec.run_spec import Resources, Topology

Pause = Callable[[], None]
"""Waits a moment. A backend calls it when it has nothing new to yield."""

RETRY_SECONDS = 300.0
"""Seconds for which `wait` and `--follow` keep asking a backend that does not answer."""

log = logging.getLogger(__name__)


class Retry:
    """Tolerates a backend that does not answer for a while, as when parts of a cluster restart."""

    def __init__(self) -> None:
        self._since: float | None = None

    def failed(self, error: Unreachable) -> None:
        """Log the first failure. Raises `error` after RETRY_SECONDS without an answer."""
        if self._since is None:
            log.warning("%s; trying again", error)
            self._since = time.monotonic()
        if time.monotonic() - self._since > RETRY_SECONDS:
            raise error

    def succeeded(self) -> None:
        """Note that the backend answered."""
        self._since = None


class Backend(Protocol):
    """Where runs go: local processes, Flyte, or Kubernetes alone.

    Every method but `submit` raises RunNotFound for an unknown name.
    """

    name: str

    def gpu(self, resources: Resources) -> Gpu | None:
        """The GPU model that a run would get; None without a GPU, or for a model that is not in `GPUS`."""

    def require_admission(self, resources: Resources, topology: Topology) -> None:
        """Raises BackendError if no queue can ever admit such a run. Warns if that is not known."""

    def me(self) -> str:
        """The owner of runs that are submitted through this backend."""

    def finished(self, spec: RunSpec) -> Run | None:
        """The run, if it is known that it has succeeded with this very spec; None if only starting it can tell."""

    def submit(self, spec: RunSpec) -> Run:
        """Start the run, or continue the one in the spec's folder. Raises RunExists if that one has not ended."""

    def get(self, name: str) -> Run:
        """The current state of the run."""

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """All lines so far; with `pause` also later ones, until the run ends."""

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The points so far in the order of writing; with `pause` also later ones, until the run ends."""

    def events(self, name: str) -> list[Event]:
        """All events so far, the oldest first."""

    def cancel(self, name: str) -> None:
        """Ask the run to end, without waiting. Does nothing if it has ended."""

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Paths of the outputs of a run that succeeded; with `to`, of copies in that folder."""

    def list(self, limit: int | None, owner: str | None) -> list[Run]:
        """The newest `limit` runs, or all; with `owner` only those that this person submitted."""

    def held(self, since: float) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """What every submission since a time held, the newest first, however it ended; None if that is not known."""


def execution_name(name: str, number: int) -> str:
    """The name of a run's `number`-th execution on a cluster. It has to begin with a letter."""
    first = name if name[:1].isalpha() else f"run-{name}"
    return first if number == 1 else f"{first}-x{number}"


def already_runs(name: str, state: str, where: str) -> RunExists:
    """The error for a submission of a run that has not ended; `state` and `where` complete the sentence."""
    return RunExists(
        f"run {name!r} {state}, {where}; follow it with 'strata logs -f {name}', end it with 'strata cancel {name}', "
        "or choose another name"
    )


def find_gpu(name: str) -> Gpu | None:
    """The GPU model with this name; warns and returns None if `GPUS` does not have it."""
    found = gpu_by_name(name)
    if found is None:
        log.warning("cannot estimate whether the run fits: %s is not among %s", name, ", ".join(GPUS))
    return found


def destinations(to: Path) -> dict[str, Path]:
    """Paths for copies of the outputs in the folder `to`, which is created.

    Raises BackendError if `to` cannot be created, or has such files already.
    """
    found = RunLayout(to).outputs
    existing = [str(path) for path in found.values() if path.exists()]
    if existing:
        raise BackendError(f"{', '.join(existing)} exists already; give another folder", status=409, reason="Exists")
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(f"the folder {to} cannot be created: {error.strerror}; give another", status=409) from error
    return found


def parse_points(values: Iterable[Mapping[str, Any]]) -> Iterator[MetricPoint]:
    """Parse points. Skips evaluations, and values that are not a point, and warns of the first of those."""
    left_out = False
    for item in values:
        try:
            if EvaluationPoint.of(item) is not None:
                continue
            point = MetricPoint.of(item)
        except TypeError as error:
            if not left_out:
                log.warning("metrics of another version, or cut off by a kill, are left out: %s", error)
            left_out = True
        else:
            yield point


def eval_loss(values: Mapping[str, Any]) -> float | None:
    """The validation loss in the values of an evaluation; None if another version wrote them."""
    try:
        point = EvaluationPoint.of(values)
    except TypeError:
        return None
    return None if point is None else point.loss


def with_progress(run: Run, last: Sequence[MetricPoint]) -> Run:
    """`run` with the step, loss and rate of its newest point, and the time that its remaining steps will take."""
    if not last:
        return run
    eta = None
    if run.stage is Stage.TRAINING and run.steps is not None:
        eta = (run.steps - last[-1].step) * statistics.median(point.step_seconds for point in last[-20:])
    newest = last[-1]
    return replace(run, step=newest.step, loss=newest.loss, tokens_per_second=newest.tokens_per_second, eta=eta)
