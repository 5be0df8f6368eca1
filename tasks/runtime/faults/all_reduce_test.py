"""How fast are all-reduces between nodes: `torchrun -m tasks.runtime.faults.all_reduce_test [--min-bandwidth GB/S]`.

NCCL on GPUs, gloo on CPUs. Rank 0 prints a line per size, with the bandwidths that nccl-tests define: bytes of a tensor
by time, and that times 2 (n - 1) / n, which is to be compared with what a link can do. Every process ends with exit
code 1 if a sum is wrong, or if the bus bandwidth of the largest size is below the minimum; rank 0 names the processes
whose links are slow. `helm test` runs it if `tests.allReduce.nodes` asks for it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

import torch

from tasks.runtime.faults.health_check import (
    Unhealthy,
    bus_bandwidth,
    raise_if_slow,
    raise_if_wrong_sums,
)
from tasks.runtime.process.ranks import Processes

_MIB = 2**20


def sizes(largest: int) -> list[int]:
    """Sizes in MiB, each four times the one before; the last is `largest`.

    >>> sizes(1024)
    [1, 4, 16, 64, 256, 1024]
    >>> sizes(6)
    [1, 4, 6]
    """
    found = [1]
    while found[-1] < largest:
        found.append(min(4 * found[-1], largest))
    return found


def measure(processes: Processes, largest: int, minimum: float, nodes: int) -> None:
    """Print the table. A collective.

    Raises:
        Unhealthy: a sum is wrong, the bandwidth is below `minimum` GB/s, or the GPUs are of fewer than `nodes` nodes.
    """
    number = processes.world_size
    places = processes.gather(os.environ.get("NODE_NAME") or socket.gethostname())
    used = processes.on_main(lambda: sorted(set(places or [])))
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if torch.cuda.is_available() else "gloo"
    if processes.is_main:
        print(f"all-reduce of {number} processes on {', '.join(used)}: {backend}, torch {torch.__version__}")
        print(f"{'MiB':>6}  {'ms':>9}  {'GB/s':>8}  {'bus GB/s':>8}", flush=True)
    # Without GPUs, this tries the test itself.
    if torch.cuda.is_available() and len(used) < nodes:
        raise Unhealthy(f"the processes share {len(used)} nodes, of {nodes} that were asked for; ask for whole nodes")
    speed, values = 0.0, torch.empty(0)
    for size in sizes(largest):
        values = torch.full((size * _MIB // 4,), float(processes.rank + 1), device=processes.device)
        raise_if_wrong_sums(processes, values)
        speed = bus_bandwidth(processes, values)
        if processes.is_main:
            algorithm = speed * number / (2 * (number - 1))
            print(f"{size:>6}  {values.nbytes / algorithm / 1e6:>9.3f}  {algorithm:>8.2f}  {speed:>8.2f}", flush=True)
    raise_if_slow(processes, values, speed, minimum, "the minimum")


def main() -> None:
    """Measure among the processes of this job, and exit."""
    parser = argparse.ArgumentParser(prog="python -m tasks.runtime.faults.all_reduce_test", description=__doc__)
    parser.add_argument("--min-bandwidth", type=float, default=0.0, metavar="GB/S", help="of the largest size; 0: any")
    parser.add_argument("--largest", type=int, default=1024, metavar="MIB", help="largest tensor (default: 1024)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the GPUs have to be of (default: 1)")
    asked = parser.parse_args()
    processes = Processes.from_environment()
    if processes.world_size < 2:
        parser.error("an all-reduce takes two processes or more; start them with torchrun")
    processes.connect()
    failed = False
    try:
        measure(processes, asked.largest, asked.min_bandwidth, asked.nodes)
    except Unhealthy as error:
        failed = True
        if processes.is_main:
            print(f"error: {error}", flush=True)
    # The elastic agent ends all processes when it sees one fail, rank 0 before it has spoken.
    processes.barrier()
    processes.disconnect()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
