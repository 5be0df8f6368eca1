"""Limits on the time that calls to a store may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class TimeBudget:
    """A limit on the total seconds of calls. Overlapping calls count once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running = 0
        self._since = self._spent = 0.0

    @property
    def spent(self) -> float:
        """Seconds in which at least one call was running."""
        with self._lock:
            return self._so_far()

    def call(self, function: Callable[[], T]) -> T:
        """Call the function; returns its result or raises its exception.

        Raises:
            TimeoutError: the budget is spent. The call continues in a daemon thread, which does not delay the end of
                the process.
        """
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            left = self._seconds - self._so_far()
            self._running += 1
        try:
            result: Future[T] = Future()
            if left > 0:
                threading.Thread(target=_run, args=(function, result), daemon=True).start()
            return result.result(max(left, 0.0))
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._spent += time.monotonic() - self._since

    def _so_far(self) -> float:
        return self._spent + (time.monotonic() - self._since if self._running else 0.0)


def _run(function: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)


@dataclass
class CircuitBreaker:
    """Circuit breaker for calls to a store: opens when a call fails, or when calls take more than `seconds` in total.

    When it is open, calls return None at once, so that a store that is down is not retried for every kernel. The reason
    is added to `problems`.
    """

    seconds: float = 60.0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._budget = TimeBudget(self.seconds)
        self._lock = threading.Lock()
        self._open = False

    @property
    def spent(self) -> float:
        """Seconds in which at least one call was running."""
        return self._budget.spent

    def call(self, action: str, function: Callable[[], T]) -> T | None:
        """The result of the function; None if it fails or the breaker is open. `action`: "read", "push to", ..."""
        if self._open:
            return None
        try:
            return self._budget.call(function)
        except TimeoutError:
            reason = f"no answer within {self.seconds:g} s in all"
        # Store clients raise many exception classes; all go into the report.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if not self._open:
                self._open = True
                self.problems.append(f"could not {action} the store, so it is not used again: {reason}")
        return None
