"""For tests of code that uses the client: a backend in memory, without processes, threads or time.

from strata_platform import Client, Phase, RunSpec
from strata_platform.testing import FakeBackend, metric_point

backend = FakeBackend([metric_point(1, loss=2.0), metric_point(2, loss=1.0), Phase.SUCCEEDED])
client = Client(backend, poll=0)
run = client.submit(RunSpec(name="run"))
assert client.wait("run").loss == 1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from strata_platform.backends.backend import Pause, destinations, with_progress
from strata_platform.errors import NotReady, RunExists, RunNotFound
from strata_platform.estimate import Gpu
from strata_platform.owner import this_user
from strata_platform.run_layout import RunLayout
from strata_platform.runs import Event, Held, LogLine, MetricPoint, Outputs, Phase, Run, Stage
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Resources, Topology

Item = LogLine | MetricPoint | Event | Stage | Phase
"""An item of a script: a line, step or event is added to the run, or the run enters a stage or a phase."""

T = TypeVar("T", LogLine, MetricPoint)


def metric_point(step: int, loss: float = 1.0, **values: Any) -> MetricPoint:
    """A step with plausible values for every field that `values` does not name."""
    usual = {
        "attempt": 0,
        "time": float(step),
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens": 8 * step,
        "target_tokens": 4 * step,
        "tokens_per_second": 100.0,
        "step_seconds": 2.0,
        "memory_bytes": 1,
    }
    return MetricPoint(step=step, loss=loss, **(usual | values))


SUCCESS: tuple[Item, ...] = (
    Stage.TRAINING,
    LogLine(1.0, 0, "training"),
    metric_point(1, 2.0),
    metric_point(2, 1.0),
    Phase.SUCCEEDED,
)
"""Two steps, then the end."""


@dataclass
class _FakeRun:
    run: Run
    items: Iterator[Item]
    played: list[Item] = field(default_factory=list)


class FakeBackend:
    """A backend whose runs follow a script.

    Every look at a run, `get` or a pause while it is followed, plays one item of the script; one item a look makes
    every intermediate state visible to the code under test. A run whose script ends without a final phase stays as it
    is, and following it raises AssertionError instead of waiting for ever.
    """

    name = "fake"

    def __init__(self, script: Sequence[Item] = SUCCESS, *, gpu: Gpu | None = None) -> None:
        self.submitted: list[RunSpec] = []
        """The spec of every submission, the oldest first."""
        self._script, self._gpu = tuple(script), gpu
        self._runs: dict[str, _FakeRun] = {}
        self._clock = count(1)

    def gpu(self, resources: Resources) -> Gpu | None:
        """The GPU that the constructor was given."""
        return self._gpu

    def require_admission(self, resources: Resources, topology: Topology) -> None:
        """Every run is admitted."""

    def me(self) -> str:
        """Who this process belongs to, or STRATA_OWNER."""
        return this_user()

    def finished(self, spec: RunSpec) -> None:
        """Every run is started."""

    def submit(self, spec: RunSpec) -> Run:
        """Add the run. Raises RunExists if it has not ended."""
        known = self._runs.get(spec.name)
        if known is not None and not known.run.is_done:
            raise RunExists(f"run {spec.name!r} is still {known.run.phase}; cancel it or choose another name")
        self.submitted.append(spec)
        run = Run(
            name=spec.name,
            backend=self.name,
            phase=Phase.QUEUED,
            stage=Stage.WAITING,
            submitted=float(next(self._clock)),
            steps=spec.training.steps,
            where=f"fake://{spec.name}",
        )
        self._runs[spec.name] = _FakeRun(run, iter(self._script), known.played if known else [])
        return run

    def get(self, name: str) -> Run:
        """Play one item, and return the run."""
        self._play(name)
        return self._run(name)

    def logs(self, name: str, pause: Pause | None) -> Iterator[LogLine]:
        """The lines played so far; with `pause` also those to come."""
        return self._follow(name, pause, LogLine)

    def metrics(self, name: str, pause: Pause | None) -> Iterator[MetricPoint]:
        """The steps played so far; with `pause` also those to come."""
        return self._follow(name, pause, MetricPoint)

    def events(self, name: str) -> list[Event]:
        """The events played so far."""
        return [item for item in self._find(name).played if isinstance(item, Event)]

    def cancel(self, name: str) -> None:
        """End the run as aborted, if it has not ended."""
        found = self._find(name)
        if not found.run.is_done:
            self._enter(found, Phase.ABORTED)

    def outputs(self, name: str, to: Path | None) -> Outputs:
        """Paths of outputs that do not exist; with `to`, an empty model folder and empty files there."""
        found = self._find(name)
        if found.run.phase is not Phase.SUCCEEDED:
            raise NotReady(f"{name} is {found.run.phase}: outputs exist once a run has succeeded")
        layout = RunLayout(Path("/fake") / name)
        if to is None:
            return Outputs(**{kind: str(path) for kind, path in layout.outputs.items()})
        copies = destinations(to)
        for kind, copy in copies.items():
            copy.mkdir() if kind == "model" else copy.touch()
        return Outputs(**{kind: str(copy) for kind, copy in copies.items()})

    def list(self, limit: int | None, owner: str | None) -> list[Run]:
        """The newest runs. They have no owner."""
        found = [run for run in map(self._run, self._runs) if owner in (None, run.owner)]
        return sorted(found, key=lambda run: run.submitted or 0.0, reverse=True)[:limit]

    def held(self, since: float) -> Iterator[tuple[Run, Sequence[Held] | None]]:
        """The runs; what they held is not known."""
        return ((run, None) for run in self.list(None, None) if (run.submitted or 0.0) >= since)

    def _find(self, name: str) -> _FakeRun:
        if name not in self._runs:
            raise RunNotFound(f"no run was submitted as {name!r}; runs: {', '.join(self._runs) or 'none'}")
        return self._runs[name]

    def _run(self, name: str) -> Run:
        found = self._find(name)
        return with_progress(found.run, [item for item in found.played if isinstance(item, MetricPoint)])

    def _play(self, name: str) -> bool:
        """Play the next item; False if there is none, or the run has ended."""
        found = self._find(name)
        item = None if found.run.is_done else next(found.items, None)
        if item is None:
            return False
        if isinstance(item, Phase):
            self._enter(found, item)
        elif isinstance(item, Stage):
            found.run = replace(found.run, phase=Phase.RUNNING, stage=item)
        found.played.append(item)
        return True

    def _enter(self, found: _FakeRun, phase: Phase) -> None:
        if phase.is_end:
            found.run = replace(found.run, phase=phase, stage=None, ended=float(next(self._clock)))
        else:
            found.run = replace(found.run, phase=phase)

    def _follow(self, name: str, pause: Pause | None, kind: type[T]) -> Iterator[T]:
        found = self._find(name)

        def items() -> Iterator[T]:
            position = 0
            while True:
                for item in found.played[position:]:
                    if isinstance(item, kind):
                        yield item
                position = len(found.played)
                if pause is None or found.run.is_done:
                    return
                pause()
                assert self._play(name), f"the script of {name} ended without a final phase: it is followed for ever"

        return items()
