"""SIGTERM: the cluster wants the machine back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Preempted(BaseException):
    """The process was asked to stop before its work was done; a new attempt continues from the last checkpoint.

    Like KeyboardInterrupt not an Exception: no library on the way up may swallow it.
    """


@contextmanager
def preemptible() -> Iterator[None]:
    """Turn SIGTERM into `Preempted`, raised where the main thread is at that moment.

    Raising at once, rather than at the next step, is safe because a checkpoint counts only when its manifest is written,
    and that is written last. Outside the main thread signals cannot be handled; then nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # A second SIGTERM must not interrupt the clean-up after the first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Preempted(signal.Signals(number).name)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
