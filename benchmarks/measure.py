"""How `benchmarks.ops` measures: correctness first, then device time, wall time and memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]
Call = Callable[[], Any]

# Inputs rotate until they are together this large, so that none is in a cache when its turn comes.
_COLD_BYTES = 512 * 2**20
# How long the chip is kept busy before a time is taken, and for how long samples are taken.
_WARM_MS = 100
_SAMPLED_MS = 200


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def trained(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in inputs if x.requires_grad]


def differentiate(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, then the gradients of all inputs that require one, for incoming gradients that repeat."""
    results = as_tuple(function(*inputs))
    gradients = torch.autograd.grad(results, trained(inputs), incoming(results))
    return [*(y.detach() for y in results), *gradients]


def incoming(results: Sequence[Tensor]) -> list[Tensor]:
    """One for a loss; otherwise noise in the layout of the result, exact in every dtype and drawn once for a row."""
    generator = torch.Generator().manual_seed(0)

    def draw(y: Tensor) -> Tensor:
        if y.dim() == 0:
            return torch.ones_like(y, requires_grad=False)
        row = torch.randn(y.shape[-1], generator=generator).bfloat16()
        return torch.empty_like(y, requires_grad=False).copy_(row)

    return [draw(y) for y in results]


@dataclass(frozen=True)
class Error:
    """A result's or gradient's largest distance to fp64 over the largest fp64 value, and what is allowed."""

    mine: float
    allowed: float

    @property
    def ok(self) -> bool:
        """False for NaN, too."""
        return self.mine <= self.allowed

    def __str__(self) -> str:
        return f"{self.mine:.1e} of {self.allowed:.1e}"


class Gate:
    """Holds functions to the bar: no further from fp64 than twice PyTorch in the same dtype, and the rounding of fp32.

    torchs: what PyTorch does. exact: called with the inputs in fp64; the same unless that takes too much memory.
    make: the inputs, the same values at every call.
    """

    def __init__(self, torchs: Function, exact: Function, make: Callable[[], Sequence[Tensor]]) -> None:
        self._make = make
        inputs = make()
        wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
        self._exact = differentiate(exact, wide)
        del wide
        eps = 2 * torch.finfo(torch.float32).eps
        theirs = zip(differentiate(torchs, inputs), self._exact, strict=True)
        self._allowed = [2 * _distance(y, truth) + eps for y, truth in theirs]

    def check(self, function: Function) -> tuple[list[Error], bool]:
        """The errors, and whether the inputs were left as they were. What the function allocates is full of NaN."""
        inputs = self._make()
        _poison(inputs[0].device)
        found = zip(differentiate(function, inputs), self._exact, self._allowed, strict=True)
        errors = [Error(_distance(y, truth), allowed) for y, truth, allowed in found]
        return errors, all(torch.equal(x, fresh) for x, fresh in zip(inputs, self._make(), strict=True))


@torch.no_grad()
def _distance(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).abs().max() / exact.abs().max())


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((int(0.4 * free) // 4,), float("nan"), device=device)


def rotated(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """As many sets of inputs as make their sum larger than any cache."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in first)
    return [first, *(make() for _ in range(-(-_COLD_BYTES // size) - 1))]


def step(function: Function, inputs: Sequence[Tensor]) -> Call:
    """A call of forward and backward; the incoming gradients are there before."""
    # With gradients on, or `torch.compile` would compile the function once more without.
    gradients = incoming(as_tuple(function(*inputs)))
    leaves = trained(inputs)
    return lambda: torch.autograd.grad(as_tuple(function(*inputs)), leaves, gradients)


def device_ms(calls: Sequence[Call], graph: bool = True) -> float:
    """Median milliseconds of a call on the GPU: a CUDA graph of all the calls, replayed, without the host.

    Without `graph` the calls are made eagerly between two events, and short ones are measured with their launches.
    """
    return in_turns_ms([calls], graph)[0]


def in_turns_ms(groups: Sequence[Sequence[Call]], graph: bool = True) -> list[float]:
    """`device_ms` of each group, replayed in turns so that all meet the same clocks; `graph` is for the first."""
    runs = [_captured(calls) if graph or i else _eager(calls) for i, calls in enumerate(groups)]
    once = sum(_timed(run) for run in runs)
    # A chip that was idle runs slower at first.
    for _ in range(_rounds(once, _WARM_MS, 1, 1000)):
        for run in runs:
            run()
    samples = [[_timed(run) for run in runs] for _ in range(_rounds(once, _SAMPLED_MS, 4, 50))]
    return [
        statistics.median(found) / len(calls) for found, calls in zip(zip(*samples, strict=True), groups, strict=True)
    ]


def _rounds(once: float, budget: float, least: int, most: int) -> int:
    """How many rounds of `once` milliseconds fit into the budget, within bounds."""
    return int(min(max(budget / max(once, 1e-3), least), most))


def _timed(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _eager(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    run()
    return run


def _captured(calls: Sequence[Call]) -> Call:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def wall_ms(groups: Sequence[Sequence[Call]], device: torch.device) -> list[float]:
    """Median milliseconds of an eager call of each group with all that the host does; calls do not wait for each other.

    The groups take turns. Python collects no garbage meanwhile.
    """

    def once(calls: Sequence[Call]) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for call in calls:
            call()
        _synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    gc.collect()
    gc.disable()
    try:
        rounds = _rounds(sum(once(calls) for calls in groups) / len(groups), _SAMPLED_MS, 1, 20)
        samples = [[once(calls) for calls in groups] for _ in range(rounds)]
    finally:
        gc.enable()
    return [
        statistics.median(found) / len(calls) for found, calls in zip(zip(*samples, strict=True), groups, strict=True)
    ]


def extra_mib(call: Call) -> float:
    """Peak memory of a call beyond what was held before, its results included, MiB."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak / 2**20


class Limits(NamedTuple):
    """What the chip can do: GB/s of a copy of 1 GiB, read and written, and TFLOP/s of a bf16 product of 8192-cubes."""

    copy: float
    product: float


def limits(device: torch.device) -> Limits:
    """The limits now, on a chip that has warmed up."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = device_ms([lambda: a @ b] * 4)
    # Not in a graph: there a copy is a node of its own kind, a third slower than the kernel that runs eagerly.
    copy = device_ms([lambda: target.copy_(source)] * 4, graph=False)
    return Limits(2 * 2**30 / copy / 1e6, 2 * 8192**3 / product / 1e9)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds that the block takes to `seconds[phase]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
