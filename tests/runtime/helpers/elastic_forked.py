"""torchrun on one machine, whose agent forks its workers, as it does in a training task of Flyte.

    python -m tests.runtime.helpers.elastic_forked PROCESSES RESTARTS MODULE [ARGUMENT...]

Under torchrun each worker imports all that the agent has imported again, and so does each worker of the next attempt.
"""

import runpy
import sys
from uuid import uuid4

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def work(module, arguments):
    """What a worker does: `python -m MODULE ARGUMENT...`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    processes, restarts, module, *arguments = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(processes), max_restarts=int(restarts), run_id=uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(config, work)(module, arguments)
