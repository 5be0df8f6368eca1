"""The health check before training: GPU memory, arithmetic and connections.

Without it, a GPU that computes wrongly or a slow link shows up hours later, as a hang or as a loss that nobody can
explain.
"""

from __future__ import annotations

import logging
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from strata_platform.outcomes import UNHEALTHY, RunError
from strata_platform.spec.sections.faults import Faults
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.watchdog import Watchdog
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)

# How long the check waits for a previous process to release GPU memory.
RELEASE_SECONDS = 10.0
# After how many seconds the check counts as hanging; connecting many nodes takes time.
HANG_SECONDS = 300

Link = tuple[int, int]
"""The ranks of two connected processes."""


class Unhealthy(RunError):
    """A GPU or a connection is not fit to train on; another machine may be."""

    outcome = UNHEALTHY


@dataclass
class Finding:
    """What one process measured on its own device."""

    place: str
    """Description of the process and its node."""
    problems: list[str] = field(default_factory=list)
    teraflops: float = 0.0
    free: float = 1.0
    """Fraction of the device's memory that is free."""


def check_health(faults: Faults, folder: RunFolder, processes: Processes) -> None:
    """Check memory, arithmetic and connections, in less than two seconds. A collective.

    Raises:
        Unhealthy: a check failed. Raised on every rank; the message names the processes and nodes at fault.
    """
    if not faults.health_check:
        return
    began = time.monotonic()
    limit = min(HANG_SECONDS, faults.hang_timeout)
    # A separate folder, so that hang reports of an earlier start are not read.
    start = processes.on_main(lambda: f"start-{time.time_ns()}")
    watchdog = Watchdog(folder.hangs / start, processes.rank, processes.world_size, limit)
    with closing(watchdog):
        watchdog.start()
        watchdog.expect("the health check")
        found = processes.gather(_look(faults, processes))
        _raise_if_unfit(processes, lambda: _problems(found or []))
        speed = _connections(faults, processes) if processes.world_size > 1 else None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if found:
        log.info("health: %s, %.1f s", summary(found, speed), time.monotonic() - began)


def summary(found: list[Finding], speed: float | None) -> str:
    """Measurements of all devices, for the log.

    >>> summary([Finding("", [], 700.0, 0.99), Finding("", [], 650.0, 0.98)], 340.0)
    'memory 98 % free, matrix products 650 to 700 TFLOP/s, all-reduce 340 GB/s'
    """
    rates = sorted(finding.teraflops for finding in found)
    spread = f"{rates[0]:.3g}" if len(rates) == 1 else f"{rates[0]:.3g} to {rates[-1]:.3g}"
    free = min(finding.free for finding in found)
    connected = "" if speed is None else f", all-reduce {speed:.3g} GB/s"
    return f"memory {100 * free:.0f} % free, matrix products {spread} TFLOP/s{connected}"


def describe_process(processes: Processes) -> str:
    """A process by rank, GPU and node."""
    where = f"GPU {processes.local_rank} of " if torch.cuda.is_available() else ""
    return f"process {processes.rank} ({where}{os.environ.get('NODE_NAME') or socket.gethostname()})"


def _look(faults: Faults, processes: Processes) -> Finding:
    finding = Finding(describe_process(processes))
    try:
        if torch.cuda.is_available():
            finding.free = _free_share(processes.device, faults.min_free_memory)
            if finding.free < faults.min_free_memory:
                finding.problems.append(
                    f"{100 * finding.free:.0f} % of its memory is free, and faults.min_free_memory is "
                    f"{faults.min_free_memory}: something else runs on it"
                )
        wrong, finding.teraflops = _products(processes.device)
        if wrong:
            finding.problems.append(f"{wrong} values of a matrix product are wrong")
    # Report any error: the other ranks wait for this finding.
    except RuntimeError as error:
        finding.problems.append(str(error).partition("\n")[0])
    return finding


def _free_share(device: torch.device, enough: float) -> float:
    """The fraction of free memory, after waiting for a previous process to release its own."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if free >= enough * total or time.monotonic() > deadline:
            return free / total
        time.sleep(0.2)


def _products(device: torch.device) -> tuple[int, float]:
    """The number of wrong values in matrix products with a known result, and TFLOP/s.

    The factors are a_i s_k and s_k b_j with signs s, so every value of the product is K a_i b_j, an integer that the
    dtype represents exactly.
    """
    size, times = (8192, 4) if device.type == "cuda" else (128, 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    numbers = torch.arange(size, device=device)
    signs = 1 - 2 * (numbers * numbers // 3 % 2)
    rows, columns = numbers % 7 - 3, numbers % 5 - 2
    left = (rows[:, None] * signs[None]).to(dtype)
    right = (signs[:, None] * columns[None]).to(dtype)
    expected = (size * rows).to(dtype)[:, None] * columns.to(dtype)[None]
    wrong = torch.zeros_like(expected, dtype=torch.bool)

    def multiply() -> None:
        for _ in range(times):
            wrong.logical_or_(left @ right != expected)

    # Load the kernels before timing.
    multiply()
    seconds = _timed(device, multiply, times=1)
    return int(wrong.sum()), 2 * size**3 * times / seconds / 1e12


def _problems(found: list[Finding]) -> str:
    return "; ".join(f"{finding.place}: {problem}" for finding in found for problem in finding.problems)


def _raise_if_unfit(processes: Processes, message: Callable[[], str]) -> None:
    """Raise `Unhealthy` on every rank if the text from rank 0 is not empty."""
    problems = processes.on_main(message)
    if problems:
        raise Unhealthy(f"not fit to train on: {problems}. Nothing was started; take the node out of the cluster")


def _connections(faults: Faults, processes: Processes) -> float:
    """Bus bandwidth of an all-reduce in GB/s. Raises `Unhealthy` for wrong sums or a slow network."""
    device = processes.device
    size = (64 << 20) if device.type == "cuda" else (64 << 10)
    values = torch.full((size,), float(processes.rank + 1), device=device)
    raise_if_wrong_sums(processes, values)
    speed = bus_bandwidth(processes, values)
    if faults.min_bandwidth is not None:
        raise_if_slow(processes, values, speed, faults.min_bandwidth, "faults.min_bandwidth")
    return speed


def raise_if_wrong_sums(processes: Processes, values: torch.Tensor) -> None:
    """All-reduce `values`, rank + 1 everywhere, and raise `Unhealthy` on every rank if a sum is wrong. A collective."""
    number = processes.world_size
    # The first all-reduce also connects the ranks, which takes longer.
    dist.all_reduce(values)
    wrong = int((values != number * (number + 1) / 2).sum())
    outcomes = processes.gather(
        f"{describe_process(processes)}: {wrong} values of a sum over all are wrong" if wrong else ""
    )
    _raise_if_unfit(processes, lambda: "; ".join(filter(None, outcomes or [])))


def bus_bandwidth(processes: Processes, values: torch.Tensor) -> float:
    """GB/s of an all-reduce of `values`, as nccl-tests define it for the bus; the slowest rank's. A collective."""
    number = processes.world_size
    seconds = _timed(values.device, lambda: dist.all_reduce(values))
    # All ranks must compare the same number, or some would wait for the others.
    slowest = torch.tensor(2 * (number - 1) / number * values.nbytes / seconds / 1e9)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return float(slowest)


def raise_if_slow(processes: Processes, values: torch.Tensor, speed: float, floor: float, name: str) -> None:
    """Raise `Unhealthy` on every rank if `speed` is below `floor`, with the ranks at fault. A collective.

    `values`: what neighbors exchange to find these. `name`: of the floor.
    """
    if speed < floor:
        links = processes.gather(_links(processes, values))
        places = processes.gather(describe_process(processes))
        _raise_if_unfit(processes, lambda: _slow(speed, floor, name, _merged(links or []), places or []))


def _links(processes: Processes, values: torch.Tensor) -> dict[Link, float]:
    """GB/s in each direction between this rank and its neighbors, the next and the previous rank."""
    rank, number = processes.rank, processes.world_size
    found = {}
    for turn in (0, 1):
        # First 0-1, 2-3, ..., then 1-2, 3-4, ..., and the last with the first if both are left.
        partner = rank + 1 if rank % 2 == turn else rank - 1
        if turn == 1 and number % 2 == 0:
            partner %= number
        if not 0 <= partner < number or partner == rank:
            continue
        received = torch.empty_like(values)

        def exchange(partner: int = partner, received: torch.Tensor = received) -> None:
            sent = [dist.P2POp(dist.isend, values, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(sent):
                work.wait()

        exchange()
        found[min(rank, partner), max(rank, partner)] = values.nbytes / _timed(values.device, exchange) / 1e9
    return found


def _merged(links: list[dict[Link, float]]) -> dict[Link, float]:
    merged: dict[Link, float] = {}
    for found in links:
        for link, speed in found.items():
            merged[link] = min(speed, merged.get(link, speed))
    return merged


def _slow(speed: float, floor: float, name: str, links: Mapping[Link, float], places: list[str]) -> str:
    blamed = slow_processes(links)
    by = " and ".join(places[rank] for rank in blamed) if blamed else "no process more than others"
    listed = ", ".join(f"{a}-{b} {links[a, b]:.3g}" for a, b in sorted(links, key=lambda link: links[link])[:8])
    return (
        f"all processes together reach {speed:.3g} GB/s in an all-reduce, and {name} is {floor:g}; "
        f"slowed down by {by} (GB/s between neighbors, slowest first: {listed})"
    )


def slow_processes(links: Mapping[Link, float]) -> list[int]:
    """Ranks that the slow links have in common, or both ends of a single link; none if all links are alike.

    >>> slow_processes({(0, 1): 40.0, (1, 2): 4.0, (2, 3): 5.0, (0, 3): 41.0})
    [2]
    """
    if not links:
        return []
    slow = [link for link, speed in links.items() if speed < 0.5 * max(links.values())]
    if len(links) == 1:
        slow = list(links)
    ends = [rank for link in slow for rank in link]
    # Every rank has two neighbors, so a slow one is the end of two slow links.
    return sorted({rank for rank in ends if ends.count(rank) > 1} or set(ends))


def _timed(device: torch.device, work: Callable[[], object], times: int = 3) -> float:
    """Median seconds of `work`."""
    taken = []
    for _ in range(times):
        _wait(device)
        began = time.monotonic()
        work()
        _wait(device)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
