"""Logging set-up of a run."""

from __future__ import annotations

import logging
import os
import sys

from strata_platform.redact import redacted


class _Redacted(logging.Formatter):
    """Removes credentials from URLs: the cluster stores a run's log lines, and other people read them."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def configure_logging() -> None:
    """Log to standard output: rank 0 from INFO on, the other ranks from WARNING on with their rank in front."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Redacted("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.handlers = [handler]
        logger.propagate = False
    if not sys.stderr.isatty():
        # In a file, every update of a progress bar is a line. transformers reads the variable when it is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Libraries import bitsandbytes where it is installed, and it looks for a package that the folder kernels/ hides.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def indented(text: str) -> str:
    """Indent text from data or a model: no line of it may look like a line of the log, which programs read."""
    return "\n    ".join(text.strip().splitlines())
