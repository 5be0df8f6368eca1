"""Compile a plan in parallel and report the results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import local
from typing import Any

import torch
import triton

from .compile_counter import compile_listener
from .plan import Plan, Specialization


@dataclass(frozen=True)
class Compiled:
    """A loaded kernel: compiled now, or found in Triton's cache (`hit`)."""

    name: str
    signature: str
    seconds: float
    hit: bool


@dataclass(frozen=True)
class Failed:
    """A kernel that could not be compiled or loaded. Training tries again when it launches the kernel."""

    name: str
    signature: str
    error: str


@dataclass(frozen=True)
class WarmupReport:
    """The results of a warm-up. `skipped` is the reason if there was nothing to do, otherwise None."""

    device: str
    planned: int
    compiled: tuple[Compiled, ...]
    failed: tuple[Failed, ...]
    seconds: float
    skipped: str | None = None

    @property
    def hits(self) -> int:
        """The number of kernels that were in the cache."""
        return sum(kernel.hit for kernel in self.compiled)

    def summary(self) -> str:
        """One line for a log."""
        if self.skipped is not None:
            return f"nothing to warm up on {self.device}: {self.skipped}"
        counts = f"{len(self.compiled) - self.hits} compiled, {self.hits} cached, {len(self.failed)} failed"
        return f"{self.planned} kernels on {self.device} in {self.seconds:.1f} s: {counts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `skipped` is left out if it is None."""
        data = {**asdict(self), "hits": self.hits}
        if self.skipped is None:
            del data["skipped"]
        return data


def warmup(plan: Plan, *, workers: int | None = None, timeout: float | None = None) -> WarmupReport:
    """Compile and load every kernel of the plan on the current CUDA device, with its launcher; never raises.

    Compiled kernels are written to Triton's cache directory, which other processes of the pod read.

    Args:
        plan: from `record`.
        workers: number of threads; default: one per CPU core that this process may use.
        timeout: seconds; kernels that are not ready by then are reported as failed, and their threads continue.

    Returns:
        A report. Without a GPU it returns at once, with the reason in `skipped`.
    """
    start = time.perf_counter()
    if not torch.cuda.is_available():
        return _skip("cpu", plan, start, "no GPU here, operators run their PyTorch reference")
    try:
        index = torch.cuda.current_device()
        device = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        return _skip("cuda", plan, start, f"CUDA does not start ({error})")
    plan = plan.on(triton.runtime.driver.active.get_current_target())
    if len(plan) == 0:
        return _skip(device, plan, start, "the plan is empty")

    def load(item: Specialization) -> None:
        with torch.cuda.device(index):
            # Accessing `run` builds the launcher, possibly with the C compiler, and loads the binary onto the device.
            assert item.compile().run is not None

    results = _compile_all(plan, load, workers or len(os.sched_getaffinity(0)), timeout)
    return WarmupReport(
        device=device,
        planned=len(plan),
        compiled=tuple(result for result in results if isinstance(result, Compiled)),
        failed=tuple(result for result in results if isinstance(result, Failed)),
        seconds=time.perf_counter() - start,
    )


def _skip(device: str, plan: Plan, start: float, reason: str) -> WarmupReport:
    return WarmupReport(device, len(plan), (), (), time.perf_counter() - start, reason)


@contextmanager
def _misses() -> Iterator[local]:
    """A thread-local whose `happened` becomes True in a thread where Triton compiles a kernel instead of reading it."""
    missed = local()

    def listener(**event: Any) -> None:
        missed.happened = not event["cache_hit"]

    with compile_listener(listener):
        yield missed


def _compile_all(
    plan: Plan, load: Callable[[Specialization], None], workers: int, timeout: float | None
) -> list[Compiled | Failed]:
    """Call `load` for every specialization, in threads: Triton releases the GIL while it compiles."""

    def timed(item: Specialization) -> Compiled:
        start = time.perf_counter()
        missed.happened = False
        load(item)
        return Compiled(item.name, item.signature, time.perf_counter() - start, not missed.happened)

    pool = ThreadPoolExecutor(min(len(plan), workers))
    with _misses() as missed:
        futures = [pool.submit(timed, item) for item in plan.specializations]
        wait(futures, timeout)
    pool.shutdown(wait=False, cancel_futures=True)
    return [_result(item, future, timeout) for item, future in zip(plan.specializations, futures, strict=True)]


def _result(item: Specialization, future: Future[Compiled], timeout: float | None) -> Compiled | Failed:
    if not future.done() or future.cancelled():
        return Failed(item.name, item.signature, f"not ready after {timeout} s")
    # Compilers raise many exception classes; all go into the report, and training starts anyway.
    error = future.exception()
    return future.result() if error is None else Failed(item.name, item.signature, f"{type(error).__name__}: {error}")
