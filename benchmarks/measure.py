"""How `benchmarks.ops` measures: correctness first, then device time, wall time and memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .operators import Function

# Inputs rotate until they are together this large, so that none is in a cache when its turn comes.
_COLD_BYTES = 512 * 2**20
_REPEATS = 20


def differentiate(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, then the gradients of all inputs that require one, for incoming gradients that repeat."""
    results = as_tuple(function(*inputs))
    generator = torch.Generator().manual_seed(0)
    incoming = [_incoming(y, generator) for y in results]
    trained = [x for x in inputs if x.requires_grad]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, trained, incoming)]


def _incoming(y: Tensor, generator: torch.Generator) -> Tensor:
    """One for a loss; otherwise noise of which every dtype holds the values exactly, drawn once for a row."""
    if y.dim() == 0:
        return torch.ones_like(y)
    return torch.randn(y.shape[-1], generator=generator).bfloat16().to(y.device, y.dtype).expand_as(y)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def errors(ours: Function, torchs: Function, inputs: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """(ours, PyTorch's, allowed) per result and gradient: the largest distance to fp64 over the largest fp64 value.

    Allowed is twice PyTorch's own, and the rounding of fp32. Memory that the operator allocates is full of NaN.
    """
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    truth = [t.cpu() for t in differentiate(torchs, exact)]
    del exact
    theirs = [t.cpu() for t in differentiate(torchs, inputs)]
    _poison(inputs[0].device)
    mine = differentiate(ours, inputs)
    rows = []
    for a, b, t in zip(mine, theirs, truth, strict=True):
        t = t.to(a.device)
        scale = float(t.abs().max())
        mine_error, their_error = (float((y.to(a.device).double() - t).abs().max()) / scale for y in (a, b))
        rows.append((mine_error, their_error, 2 * their_error + 2 * torch.finfo(torch.float32).eps))
    return rows


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that the next allocations get."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((int(0.5 * free) // 4,), float("nan"), device=device)


def rotated(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """As many sets of inputs as make their sum larger than any cache; two at the least."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in first)
    return [first, *(make() for _ in range(max(1, -(-_COLD_BYTES // size) - 1)))]


def device_ms(calls: Sequence[Callable[[], Any]], graph: bool = True) -> float:
    """Median milliseconds of a call on the GPU: a CUDA graph of all the calls, replayed, without the host.

    Without `graph` the calls are made eagerly between two events, and short ones are measured with their launches.
    """
    run = _captured(calls) if graph else lambda: [call() for call in calls]
    samples = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / len(calls))
    return statistics.median(samples[2:])


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
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


def wall_ms(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median milliseconds of an eager call with all that the host does, one after the other without waiting."""
    samples = []
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        for call in calls:
            call()
        _synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start) / len(calls))
    return statistics.median(samples[1:])


def extra_mib(call: Callable[[], Any]) -> float:
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


def limits(device: torch.device) -> tuple[float, float]:
    """(GB/s of a copy of 1 GiB, TFLOP/s of a product of 8192-cubes in bf16), measured now."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not in a graph: there a copy is a node of its own kind, a third slower than the kernel that runs eagerly.
    copy = device_ms([lambda: target.copy_(source)] * 4, graph=False)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = device_ms([lambda: a @ b] * 4)
    return 2 * 2**30 / copy / 1e6, 2 * 8192**3 / product / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
