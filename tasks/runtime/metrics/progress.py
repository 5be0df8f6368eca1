"""Reports progress to the programs that follow a run, beside the log for people."""

from __future__ import annotations

import os
from typing import Any

from strata_platform import progress_line


def report_progress(**values: Any) -> None:
    """Print `values` as a progress line on rank 0, if `STRATA_PROGRESS` is set."""
    if progress_line.VARIABLE in os.environ and os.environ.get("RANK", "0") == "0":
        print(progress_line.encode(values), flush=True)
