"""What a run tells the programs that follow it, beside what it prints for people."""

from __future__ import annotations

import os
from typing import Any

from strata_platform import told


def tell(**values: Any) -> None:
    """Print `values` as a line for programs, once for the job, where whoever started it has asked for that."""
    if told.VARIABLE in os.environ and os.environ.get("RANK", "0") == "0":
        print(told.encode(values), flush=True)
