"""Training processes that end each in its own way, under the elastic agent of `tasks.steps.agent`."""

import os
import signal
import sys
from pathlib import Path

from strata_platform.spec import RunSpec
from tasks.runtime.process.signals import die_with_agent
from tasks.steps import agent
from tasks.steps.retry import Retry
from tasks.steps.train_step import Trained


def ends(spec: RunSpec, data: Path) -> Trained:
    """One of two processes ends as `spec.name` says."""
    die_with_agent()
    is_main = os.environ["RANK"] == "0"
    if spec.name == "finishes":
        return Trained(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", data)  # type: ignore[arg-type]
    if spec.name == "stopped" and is_main:
        # What the kubelet does: SIGTERM to the pod's first process, the agent.
        os.kill(os.getppid(), signal.SIGTERM)
    if spec.name == "killed" and not is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.name != "misused":
        signal.pause()
    if not is_main:
        raise ValueError("training.micro_batch_size is too large")
    # As a process that waits for the other one in a collective.
    other = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
    while not other.exists():
        os.sched_yield()
    raise Retry("a process lost its peers")


if __name__ == "__main__":
    from tests.workflows.helpers import agent_processes

    # By its module's name: the processes load it anew.
    agent.train = agent_processes.ends
    agent.prepare_pod = lambda spec: None
    agent.MAX_RESTARTS = 0
    asked = {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}, "name": sys.argv[1], "output": sys.argv[2]}
    try:
        print("RESULT", agent.train_in_pod(RunSpec.model_validate(asked), Path(sys.argv[2])).record)
    except BaseException as error:
        print(type(error).__name__, error)
