"""Trains specs in turn with several processes: `python -m tests.runtime.forked PROCESSES SPEC[@STEP]...`.

They are forked when all is imported, which takes longer than what they train; under torchrun each imports it again.
"""

import os
import socket
import sys
import traceback

from tests.runtime.train_only import train_all


def train_as(rank, processes, port, arguments):
    """What process number `rank` does; returns its exit code."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        train_all(arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    processes = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = train_as(rank, processes, port, sys.argv[2:])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    # The others hear of one that failed when they next wait for it.
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
