"""Time limits for calls to a store."""

import threading
import time

import pytest

from strata_kernels.warmup.time_budget import CircuitBreaker, TimeBudget


def test_concurrent_calls_spend_time_once():
    budget, release = TimeBudget(30), threading.Event()
    waiting = [threading.Thread(target=budget.call, args=(release.wait,)) for _ in range(8)]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)
    release.set()
    for thread in waiting:
        thread.join()
    assert 0.2 <= budget.spent < 1.0
    with pytest.raises(ZeroDivisionError):
        budget.call(lambda: 1 // 0)


def test_a_breaker_opens_at_the_first_failure():
    breaker, calls = CircuitBreaker(30), []

    def fail() -> None:
        calls.append(1)
        raise OSError("the disk is gone")

    assert breaker.call("read", lambda: 7) == 7
    assert breaker.call("read", fail) is None
    assert breaker.call("trim", fail) is None and breaker.call("read", lambda: 7) is None
    assert calls == [1]
    assert breaker.problems == ["could not read the store, so it is not used again: OSError: the disk is gone"]


def test_a_breaker_opens_when_the_time_is_spent():
    breaker, release = CircuitBreaker(0.05), threading.Event()
    assert breaker.call("push to", release.wait) is None
    release.set()
    assert breaker.call("read", lambda: 7) is None
    assert breaker.problems == ["could not push to the store, so it is not used again: no answer within 0.05 s in all"]
