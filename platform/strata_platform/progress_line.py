"""Progress lines: JSON that a run prints on stdout for the programs that follow it, among the lines for people.

Rank 0 prints them if the environment variable `STRATA_PROGRESS` is set; every backend sets it. A pod's log is the only
channel that every cluster offers, so stages, the number of steps and metrics leave the pod this way.
"""

from __future__ import annotations

import json
from typing import Any

from strata_platform.runs import Stage

VARIABLE = "STRATA_PROGRESS"
_MARK = "@strata "


def encode(values: dict[str, Any]) -> str:
    """The progress line for `values`."""
    return _MARK + json.dumps(values, separators=(",", ":"))


def decode(line: str) -> dict[str, Any] | None:
    """The values of a progress line; None for any other line, also for one that only looks like a progress line."""
    if not line.startswith(_MARK):
        return None
    try:
        values = json.loads(line.removeprefix(_MARK))
    except ValueError:
        # A kill may cut a line off.
        return None
    if not isinstance(values, dict) or not all(_is_valid(name, value) for name, value in values.items()):
        return None
    return values


def _is_valid(name: str, value: Any) -> bool:
    """Whether a run can have reported `value` as `name`. Names of later versions take any value."""
    if name == "stage":
        return value in list(Stage)
    if name in ("steps", "attempt", "stopped_early"):
        return type(value) is int and value >= 0
    return name not in ("point", "evaluation") or isinstance(value, dict)
