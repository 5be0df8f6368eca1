"""Two processes measure all-reduces over gloo, as `helm test` starts them."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fork_server

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tasks.runtime.faults.all_reduce_test"]


@pytest.mark.parametrize(("minimum", "status"), [("0.000001", 0), ("1000000", 1)])
def test_a_bandwidth_below_the_minimum_fails_on_every_rank(minimum, status):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = fork_server.clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    started = [
        fork_server.Popen(
            [*PROGRAM, "--largest", "2", "--min-bandwidth", minimum], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_NAME": f"node-{rank}"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [status] * 2
    assert said[1] == ""
    first, header, *lines = said[0].splitlines()
    assert first.startswith("all-reduce of 2 processes on node-0, node-1: gloo, torch ")
    assert header.split() == ["MiB", "ms", "GB/s", "bus", "GB/s"]
    for size, line in zip((1, 2), lines[:2], strict=True):
        mib, milliseconds, algorithm, bus = map(float, line.split())
        # 2 (n - 1) / n is 1 for two.
        assert mib == size and algorithm == bus
        assert size * 2**20 / milliseconds / 1e6 == pytest.approx(algorithm, rel=0.1, abs=0.006)
    rest = "\n".join(lines[2:])
    assert not rest if status == 0 else re.match("error: not fit .* the minimum is 1e\\+06; slowed down by", rest)
