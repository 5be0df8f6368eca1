"""What a run tells the programs that follow it: lines of JSON among those that it prints for people.

The training processes write them where the environment variable `STRATA_TELL` is set, which every backend does. They
are the way by which a stage, a total of steps or a metric leaves a pod that nothing but its log can be read of.
"""

from __future__ import annotations

import json
from typing import Any

from strata_platform.runs import Stage

VARIABLE = "STRATA_TELL"
_MARK = "@strata "


def encode(values: dict[str, Any]) -> str:
    """The line that tells `values`."""
    return _MARK + json.dumps(values, separators=(",", ":"))


def decode(line: str) -> dict[str, Any] | None:
    """What `line` tells; None of a line that is for people, and of text that only looks like one of ours."""
    if not line.startswith(_MARK):
        return None
    try:
        values = json.loads(line.removeprefix(_MARK))
    except ValueError:
        # Torn by a kill.
        return None
    if not isinstance(values, dict) or not all(_can_be(name, value) for name, value in values.items()):
        return None
    return values


def _can_be(name: str, value: Any) -> bool:
    """Whether a run can have told `value` by this name; of names that later versions add, anything."""
    if name == "stage":
        return value in list(Stage)
    if name in ("steps", "attempt"):
        return type(value) is int and value >= 0
    return name != "point" or isinstance(value, dict)
