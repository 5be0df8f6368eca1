"""Where a start of training spends its time: moments from a pod's first process to the second step.

Each moment ends a phase. A process hands its moments to those that it starts, through the environment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from strata_platform.runs import MetricPoint

VARIABLE = "STRATA_MOMENTS"
_BEGIN = "begin"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def mark(name: str, at: float | None = None) -> None:
    """Note that a phase ends now, or `at` a time in seconds since the epoch; only the first end counts."""
    moments = _moments()
    moments.setdefault(name, time.time() if at is None else at)
    os.environ[VARIABLE] = json.dumps(moments)


def mark_pod() -> None:
    """In a pod's agent: note the begin of the pod's first process, and of this one, which fetched code comes before."""
    os.environ.pop(VARIABLE, None)
    mark(_BEGIN, _created(_first_process(os.getpid())))
    mark("code", _created(os.getpid()))


def mark_process() -> None:
    """In a training process: note its begin. Processes that are started again in a pod are a start of their own."""
    if os.environ.get(_RESTARTS, "0") != "0":
        os.environ.pop(VARIABLE, None)
    # The kernel counts in hundredths: a process may seem older than what its agent did before.
    mark("processes" if _BEGIN in _moments() else _BEGIN, max(_created(os.getpid()), *_moments().values(), 0.0))


def passed(name: str) -> bool:
    """Whether this start has come to the end of a phase."""
    return name in _moments()


def begun() -> float | None:
    """When the first process of this start began; None if nothing was noted."""
    return _moments().get(_BEGIN)


def seconds(points: Sequence[MetricPoint]) -> dict[str, float]:
    """Seconds of each phase of this start, up to its second step; {} if nothing was noted. `points`: of this start."""
    found = sorted(_moments().items(), key=lambda item: item[1])
    if not found or found[0][0] != _BEGIN:
        return {}
    phases = {name: end - before for (_, before), (name, end) in pairwise(found)}
    phases |= dict(zip(("first step", "second step"), (point.step_seconds for point in points), strict=False))
    return {name: round(lasted, 2) for name, lasted in phases.items()}


def _moments() -> dict[str, float]:
    found: dict[str, float] = json.loads(os.environ.get(VARIABLE, "{}"))
    return found


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _created(pid: int) -> float:
    """When a process was started, in seconds since the epoch."""
    up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time() - up + float(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _first_process(pid: int) -> int:
    """The oldest ancestor of a process that is in its container: in a shared namespace, process 1 is not."""
    while (parent := int(_stat(pid)[1])) > 1:
        pid = parent
    return pid
