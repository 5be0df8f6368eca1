"""Training processes that end in one way or another, under the elastic agent of `tasks.steps.agent`."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from strata_platform.spec import RunSpec
from tasks.runtime.process.signals import die_with_agent
from tasks.steps import agent
from tasks.steps.retry import Retry
from tasks.steps.train_step import Trained


def ends(spec: RunSpec, data: Path) -> Trained:
    """End as `spec.name` says."""
    die_with_agent()
    is_main = os.environ["RANK"] == "0"
    if spec.name == "stopped":
        # What the kubelet does: SIGTERM to the pod's first process, the agent.
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
    if not is_main:
        raise ValueError("training.micro_batch_size is too large")
    # As a process that waits for the other one in a collective.
    other = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
    while not other.exists():
        time.sleep(0.01)
    raise Retry("a process lost its peers")


if __name__ == "__main__":
    from tests.workflows.helpers import agent_processes

    # To format an error, torch imports its compiler, which takes seconds.
    logging.disable(logging.ERROR)
    # By its module's name: the processes load it anew.
    agent.train = agent_processes.ends
    agent.prepare_pod = lambda spec: None
    agent.MAX_RESTARTS = 0
    asked = {"name": sys.argv[1], "output": sys.argv[2]}
    if sys.argv[1] == "misused":
        asked |= {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}}
    try:
        print("RESULT", agent.train_in_pod(RunSpec.model_validate(asked), Path(sys.argv[2])).record)
    except BaseException as error:
        print(type(error).__name__, error)
