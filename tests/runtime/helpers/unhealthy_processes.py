"""Two processes look at their health, in turn as they are and as broken as they can be.

`python -m tests.runtime.helpers.unhealthy_processes` prints a line of JSON for each of CASES: what either process
raised, null for nothing.
"""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch

from strata_platform.spec import RunSpec
from tasks.runtime.faults.health_check import Unhealthy, check_health
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder

CASES = {
    "healthy": {},
    "off": {"health_check": False},
    "wrong products": {},
    "broken": {},
    "wrong sums": {},
    "slow": {"min_bandwidth": 1e6},
}


def wrong_products(matmul=torch.Tensor.__matmul__):
    def wrong(left, right):
        product = matmul(left, right)
        product[5, 7] += 1
        return product

    torch.Tensor.__matmul__ = wrong


def broken():
    def fail(left, right):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA")

    torch.Tensor.__matmul__ = fail


def wrong_sums(full=torch.full):
    torch.full = lambda *arguments, **options: full(*arguments, **options).index_fill_(0, torch.tensor([3]), 9.0)


BREAK = {"wrong products": wrong_products, "off": broken, "broken": broken, "wrong sums": wrong_sums}


def look(rank):
    healthy = torch.Tensor.__matmul__, torch.full
    processes = Processes(rank, rank, 2)
    processes.connect()
    for case, faults in CASES.items():
        if rank == 1:
            BREAK.get(case, lambda: None)()
        spec = RunSpec.model_validate({"output": tempfile.gettempdir(), "faults": faults})
        said = None
        try:
            check_health(spec.faults, RunFolder(Path(spec.output) / "run"), processes)
        except Unhealthy as error:
            said = str(error)
        torch.Tensor.__matmul__, torch.full = healthy
        outcomes = processes.gather(said)
        if rank == 0:
            print(json.dumps(outcomes), flush=True)
    processes.disconnect()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    child = os.fork()
    os.environ.update(place, RANK=str(int(child == 0)))
    look(int(child == 0))
    sys.stdout.flush()
    if child == 0:
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
