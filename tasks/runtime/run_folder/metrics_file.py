"""`metrics.jsonl`: one JSON object per line; a line for each optimizer step, and for each evaluation during training.

The file is append-only. A resumed attempt writes the steps after its checkpoint again, with a higher `attempt`. Readers
take the last line of each step and of each evaluation, so neither a torn last line nor a repeated step changes a curve.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from strata_platform.runs import EvaluationPoint, MetricPoint

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends points to the file; every `write` reaches the operating system."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A kill may leave a line without its end, and the next line would be appended to it.
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, points: Sequence[MetricPoint | EvaluationPoint]) -> None:
        """Append the points, one line each."""
        self._file.write("".join(json.dumps(point.to_dict(), allow_nan=False) + "\n" for point in points))
        self._file.flush()

    def sync(self) -> None:
        """Wait until all points are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_points(path: Path) -> list[MetricPoint]:
    """The points by step, the newest attempt's for each step; [] without a file."""
    by_step = {point.step: point for point in _lines(path) if isinstance(point, MetricPoint)}
    return [by_step[step] for step in sorted(by_step)]


def read_evaluations(path: Path) -> list[EvaluationPoint]:
    """The evaluations during training by step, the newest attempt's for each step; [] without a file."""
    by_step = {point.step: point for point in _lines(path) if isinstance(point, EvaluationPoint)}
    return [by_step[step] for step in sorted(by_step)]


def seconds_trained(path: Path) -> float:
    """Seconds from the first step of each attempt to its last one on record, with repeated steps and evaluations."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for point in _lines(path):
        seconds = point.step_seconds if isinstance(point, MetricPoint) else 0.0
        first.setdefault(point.attempt, point.time - seconds)
        last[point.attempt] = point.time
    return sum(last[attempt] - first[attempt] for attempt in first)


def _lines(path: Path) -> Iterator[MetricPoint | EvaluationPoint]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line:
            continue
        try:
            values = json.loads(line)
            yield EvaluationPoint.of(values) or MetricPoint.of(values)
        except (json.JSONDecodeError, TypeError):
            log.warning("%s:%d is not a metrics line (cut off by a kill?); skipped", path, number)
