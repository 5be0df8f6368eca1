"""Metrics of a run: one schema, one JSON object per line per optimizer step.

The file is append-only. A resumed attempt writes the steps after its checkpoint again, with a higher `attempt`; readers
take the last line of each step, so a torn last line or a repeated step never changes a curve.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """One optimizer step, over all processes."""

    step: int
    """Optimizer steps done, from 1."""
    attempt: int
    """0 for the first start of the run, one more for every restart."""
    time: float
    """Seconds since the epoch."""
    loss: float
    """Mean over the step: over its target tokens, nats, or over what else the objective counts."""
    learning_rate: float
    grad_norm: float | None
    """Global gradient norm before clipping; none with `optimizer.in_backward`."""
    tokens: int
    """Tokens processed since the run's first step, padding included."""
    target_tokens: int
    """Tokens that carried a loss since the run's first step."""
    tokens_per_second: float
    """Over the steps since the last flush."""
    step_seconds: float
    memory_bytes: int
    """Peak so far of the busiest process: allocated on the GPU, resident on the CPU."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the objective tells of the step beside its loss, each a mean over the same items."""
    data_wait_seconds: float = 0.0
    """Of `step_seconds`: what the process that waited longest for its data spent on that."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1; none where the peak of the device is not known."""
    skipped: int = 0
    """1 where the step was not taken, because of its loss or its gradients."""


_NAMES = frozenset(field.name for field in fields(Point))


class MetricsFile:
    """Appends points to a JSON-lines file; every `write` reaches the operating system."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line torn by a kill would swallow the next one.
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, points: list[Point]) -> None:
        """Append the points, one line each."""
        self._file.write("".join(json.dumps(asdict(point)) + "\n" for point in points))
        self._file.flush()

    def sync(self) -> None:
        """Wait until all points are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_points(path: Path) -> list[Point]:
    """The points of a metrics file by step, the newest attempt's for each; [] when there is no file yet."""
    by_step = {point.step: point for point in _lines(path)} if path.exists() else {}
    return [by_step[step] for step in sorted(by_step)]


def _lines(path: Path) -> Iterator[Point]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line:
            continue
        try:
            yield Point(**{name: value for name, value in json.loads(line).items() if name in _NAMES})
        except (json.JSONDecodeError, TypeError):
            log.warning("%s:%d is not a metrics line (torn by a kill?); skipped", path, number)
