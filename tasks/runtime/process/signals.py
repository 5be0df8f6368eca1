"""Signal handling: SIGTERM as an exception or a flag, and the end of workers whose elastic agent was killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


class Preempted(BaseException):
    """SIGTERM stopped the process before its work was done; a new attempt continues from the last checkpoint.

    Not a subclass of Exception, like KeyboardInterrupt, so that no library swallows it.
    """


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise `Preempted` on SIGTERM, wherever the main thread is at that moment.

    To raise at once, rather than after the step, is safe: a checkpoint counts only once its manifest is written, which
    happens last. Python handles signals in the main thread only; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        # A second SIGTERM must not interrupt the clean-up that the first one started.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Preempted(signal.Signals(number).name)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def ignore_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, for a moment in which its handler may raise and must not; in any other thread than the main one
    this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        # None: a handler that was not set from Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


class StopRequest:
    """Whether SIGTERM was received since `defer_sigterm` was entered."""

    received = False


@contextmanager
def defer_sigterm() -> Iterator[StopRequest]:
    """Inside `raise_on_sigterm`: set a flag on SIGTERM instead of raising, so that the step can finish and be saved.

    Python handles signals in the main thread only; in any other thread the flag is never set.
    """
    stop_request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return

    def record_request(number: int, frame: FrameType | None) -> None:
        stop_request.received = True

    previous = signal.signal(signal.SIGTERM, record_request)
    try:
        yield stop_request
    finally:
        signal.signal(signal.SIGTERM, previous)


def keep_sigterm_from_forks() -> None:
    """Have forks of this process take signals as a new interpreter does, and SIGTERM wait until a fork is done.

    What a handler raises meanwhile is printed and forgotten: an agent that is told to stop just then would go on. A
    fork forgets what Python has not handled yet when it begins, so that it gets SIGTERM blocked.
    """
    deferring = ExitStack()
    requests: list[StopRequest] = []

    def begin() -> None:
        requests.append(deferring.enter_context(defer_sigterm()))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def end() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        deferring.close()
        if requests.pop().received:
            # From another thread: this function, too, forgets what is raised in it.
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def end_in_fork() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end_in_fork)


_PR_SET_PDEATHSIG = 1


def die_with_agent() -> None:
    """Have the kernel kill this process when its parent, the elastic agent, ends; a no-op without an agent.

    Without it, workers of a killed agent would train on and write to the folder that the next start writes to. On
    systems other than Linux, which lack PR_SET_PDEATHSIG, `RunFolder.lock` alone prevents that.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and die_with_parent():
        # The kernel sends no signal for an agent that had ended before the call.
        agent = multiprocessing.parent_process()
        if agent is not None and not agent.is_alive():
            os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent() -> bool:
    """Have the kernel kill this process when the thread that started it ends. False where the system cannot."""
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return True
