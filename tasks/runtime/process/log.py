"""Console output of a run."""

from __future__ import annotations

import logging
import os
import sys

from strata_platform.redact import redacted


class _Redacted(logging.Formatter):
    """Of URLs what may be shown: lines of a run are kept by the cluster, and read by others."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def configure_logging() -> None:
    """Plain lines on standard output: all of the main process, warnings and errors of the others with their rank."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Redacted("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    for name in ("tasks", "strata_kernels"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.handlers = [handler]
        logger.propagate = False
    if not sys.stderr.isatty():
        # Bars are for eyes; in a file each of their updates is a line. Read when transformers is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # bitsandbytes, which others import where it is installed, looks for a package that the folder kernels/ hides.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
