"""Signals: SIGTERM, by which the cluster wants the machine back, and what ends a process with its agent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
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

    Raising at once, rather than at the next step, is safe because a checkpoint counts only when its manifest is
    written, and that is written last. Outside the main thread signals cannot be handled; then nothing is changed.
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


class Notice:
    """Whether SIGTERM came since `deferred` was entered."""

    given = False


@contextmanager
def deferred() -> Iterator[Notice]:
    """Within `preemptible`: note SIGTERM instead of raising, so that the step can end and be saved.

    Outside the main thread signals cannot be handled; then the notice is never given.
    """
    notice = Notice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return

    def note(number: int, frame: FrameType | None) -> None:
        notice.given = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, previous)


_PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """Have the kernel kill this process when the elastic agent that started it is gone; nothing to do without one.

    Workers of an agent that was killed would train on, and write where the next start writes. Where there is no such
    call they are kept from that by `RunFolder.lock` alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The kernel does not tell of an agent that was gone before.
        agent = multiprocessing.parent_process()
        if agent is not None and not agent.is_alive():
            os.kill(os.getpid(), signal.SIGKILL)
