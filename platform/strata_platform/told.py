"""What a run tells the programs that follow it: lines of JSON among those that it prints for people.

The training processes write them where the environment variable `STRATA_TELL` is set, which every backend does. They
are the way by which a stage, a total of steps or a metric leaves a pod that nothing but its log can be read of.
"""

from __future__ import annotations

import json
from typing import Any

VARIABLE = "STRATA_TELL"
_MARK = "@strata "


def encode(values: dict[str, Any]) -> str:
    """The line that tells `values`."""
    return _MARK + json.dumps(values, separators=(",", ":"))


def decode(line: str) -> dict[str, Any] | None:
    """What `line` tells; None of a line that is for people."""
    if not line.startswith(_MARK):
        return None
    try:
        values = json.loads(line.removeprefix(_MARK))
    except ValueError:
        # Torn by a kill.
        return None
    return values if isinstance(values, dict) else None
