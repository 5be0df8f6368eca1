"""Trains specs in turn with several processes: `python -m tests.runtime.forked PROCESSES SPEC[@STEP]...`.

They are forked when all is imported, which takes longer than what they train; under torchrun each imports it again.
"""

import os
import socket
import sys
import traceback

from tests.runtime.train_only import train_all


def run_as(rank, processes, port, function):
    """What process number `rank` does; returns its exit code."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        function()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_forked(processes, function):
    """Call `function` in each of so many processes; returns the exit code of the whole."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = run_as(rank, processes, port, function)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    # The others hear of one that failed when they next wait for it.
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(run_forked(int(sys.argv[1]), lambda: train_all(sys.argv[2:])))
