"""Waiting for others for so long, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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
