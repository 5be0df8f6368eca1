"""What a run tells the programs that follow it, beside what it prints for people."""

from __future__ import annotations

import os
from typing import Any

from strata_platform import progress_line


def tell(**values: Any) -> None:
    """Print `values` as a line for programs, once for the job, where whoever started it has asked for that."""
    if progress_line.VARIABLE in os.environ and os.environ.get("RANK", "0") == "0":
        print(progress_line.encode(values), flush=True)
