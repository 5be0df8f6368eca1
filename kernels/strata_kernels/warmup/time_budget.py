"""Waiting for others for so long, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

Answer = TypeVar("Answer")


class Budget:
    """Seconds that calls may take in all. Time in which several of them are under way counts once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = self._spent = 0.0

    @property
    def spent(self) -> float:
        """Seconds in which a call was under way."""
        with self._lock:
            return self._so_far()

    def call(self, function: Callable[[], Answer]) -> Answer:
        """What the function returns or raises.

        Raises:
            TimeoutError: the budget is spent. The call is left to a thread that does not keep the process alive.
        """
        with self._lock:
            if self._under_way == 0:
                self._since = time.monotonic()
            left = self._seconds - self._so_far()
            self._under_way += 1
        try:
            answer: Future[Answer] = Future()
            if left > 0:
                threading.Thread(target=_run, args=(function, answer), daemon=True).start()
            return answer.result(max(left, 0.0))
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self._spent += time.monotonic() - self._since

    def _so_far(self) -> float:
        return self._spent + (time.monotonic() - self._since if self._under_way else 0.0)


def _run(function: Callable[[], Answer], answer: Future[Answer]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


@dataclass
class Patience:
    """With a store: it has so many `seconds` for all questions, and is left alone when it has failed once.

    It would fail anew for every kernel. Why it failed goes to `problems`.
    """

    seconds: float = 60.0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._budget = Budget(self.seconds)
        self._lock = threading.Lock()
        self._lasts = True

    @property
    def spent(self) -> float:
        """Seconds in which a question was under way."""
        return self._budget.spent

    def ask(self, what: str, question: Callable[[], Answer]) -> Answer | None:
        """The store's answer; None when there is none. `what` is done to the store: "read", "push to"."""
        if not self._lasts:
            return None
        try:
            return self._budget.call(question)
        except TimeoutError:
            reason = f"no answer within {self.seconds:g} s in all"
        # Whatever a client of some store may raise is a line of the report.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if self._lasts:
                self._lasts = False
                self.problems.append(f"could not {what} the store, which was left alone then: {reason}")
        return None
