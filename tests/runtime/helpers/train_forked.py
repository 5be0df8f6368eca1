"""Trains specs in turn with several processes.

    python -m tests.runtime.helpers.train_forked PROCESSES [--narrow] SPEC[@STEP]...

They are forked when all is imported, which takes longer than what they train; under torchrun each imports it again.
"""

import os
import sys
import traceback
from pathlib import Path

from tests.helpers import fork_server
from tests.runtime.helpers.all_imports import import_everything
from tests.runtime.helpers.free_port import free_port
from tests.runtime.helpers.train_only import train_all

ROOT = Path(__file__).parents[3]


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
    port = free_port()
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


def in_turn(arguments):
    """A function that trains what the command line names, each run with a process group on a port of its own."""
    ports = [free_port() for _ in arguments]
    return lambda: train_all(arguments, ports)


def launch(*arguments, module="tests.runtime.helpers.train_forked", **variables):
    """Start this module, or another, and return when all of its processes have ended well.

    variables: of the environment, beside those that pytest was started with.
    """
    ended = fork_server.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, env=fork_server.clean_environment(**variables), text=True, capture_output=True, timeout=1800,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


if __name__ == "__main__":
    import_everything()
    sys.exit(run_forked(int(sys.argv[1]), in_turn(sys.argv[2:])))
