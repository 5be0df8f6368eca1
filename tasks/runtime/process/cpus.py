"""The number of processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def available_cpus(limit: Path = _LIMIT) -> int:
    """Processors by affinity and by the container's limit, rounded up; at least 1.

    limit: the file of control groups, version 2, with `quota period` in microseconds, or `max period`.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = limit.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return affinity
    return affinity if quota == "max" else max(1, min(affinity, -(-int(quota) // int(period))))
