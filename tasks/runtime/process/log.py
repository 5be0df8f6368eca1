"""Logging set-up of a run."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from strata_platform.redact import redacted
from tasks.runtime.process.kept_output import keep_output


class _Redacted(logging.Formatter):
    """Removes credentials from URLs: the cluster stores a run's log lines, and other people read them."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _ToStdout(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stdout` is at that moment: a progress bar replaces it, to write lines above itself."""

    def __init__(self) -> None:
        # Without the constructor of StreamHandler, which would set `stream`.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current standard output."""
        return sys.stdout


def configure_logging() -> None:
    """Log to standard output: rank 0 from INFO on, the other ranks from WARNING on with their rank in front.

    In a pod whose log is kept, this process' output is kept from here on.
    """
    keep_output()
    rank = int(os.environ.get("RANK", "0"))
    handler = _ToStdout()
    handler.setFormatter(_Redacted("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.handlers = [handler]
        logger.propagate = False
    if not sys.stderr.isatty():
        # In a file, every update of a progress bar is a line. Libraries read these when they are imported.
        for variable in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
            os.environ.setdefault(variable, "1")
    # The log of a run names missing kernels of recurrent layers once, with their price.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    # Libraries import bitsandbytes where it is installed, and it looks for a package that the folder kernels/ hides.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def indented(text: str) -> str:
    """Indent text from data or a model: no line of it may look like a line of the log, which programs read."""
    return "\n    ".join(text.strip().splitlines())
