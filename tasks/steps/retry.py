"""How a step ends an attempt that another one may mend."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from strata_platform.outcomes import RunError
from tasks.runtime.process.errors import is_final

# Seconds for which a store may be away when a task hands over a folder, and between two attempts.
STORE_SECONDS = 900.0
INITIAL_PAUSE, LONGEST_PAUSE = 1.0, 30.0

log = logging.getLogger(__name__)


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


class Patience:
    """Says when a call to a store is repeated: until `STORE_SECONDS` after the first one began, calls included.

    Another attempt of the task would queue all its pods again, behind others, for a copy.

    Args:
        problem: What did not work, for messages.
        final: Errors of the client that are raised at once, as those of `is_final` are.
    """

    def __init__(self, problem: str, final: tuple[type[Exception], ...] = ()) -> None:
        self._problem = problem
        self._final = final
        self._began, self._pause, self._has_warned = time.monotonic(), INITIAL_PAUSE, False

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before the next call, longer each time. Raises a final `error`, and Retry at the end."""
        if is_final(error, self._final):
            raise error
        passed = time.monotonic() - self._began
        if passed + self._pause > STORE_SECONDS:
            raise Retry(f"{self._problem} for {passed:.0f} s: {error}") from error
        if not self._has_warned:
            log.warning("%s (%s); trying again", self._problem, error)
            self._has_warned = True
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause
