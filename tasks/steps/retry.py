"""How a step ends an attempt that another one may mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strata_platform.outcomes import RunError

# Seconds for which a store may be away when a task hands over a folder, and between two attempts.
STORE_SECONDS = 900.0
INITIAL_PAUSE, LONGEST_PAUSE = 1.0, 30.0


class Retry(RuntimeError):
    """Another attempt of the step may succeed; the message says why."""


@contextmanager
def retried() -> Iterator[None]:
    """Raise a retryable `RunError` of the block as `Retry`."""
    try:
        yield
    except RunError as error:
        if not error.outcome.retryable:
            raise
        raise Retry(str(error)) from error


def store_pauses() -> Iterator[float]:
    """Seconds to wait after each attempt to store a folder: longer each time, and `STORE_SECONDS` in all.

    Another attempt of the task would queue all its pods again, behind others, for a copy.
    """
    waited, pause = 0.0, INITIAL_PAUSE
    while waited + pause <= STORE_SECONDS:
        yield pause
        waited += pause
        pause = min(2 * pause, LONGEST_PAUSE)
