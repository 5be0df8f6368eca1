"""Training tasks that end badly, each in its own way. Real processes under a real elastic agent."""

import os
import signal
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import RunSpec
from tasks.elastic import Training
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.ranks import Processes
from tasks.runtime.process.signals import Preempted, raise_on_sigterm
from tasks.steps import train_step

LAUNCH = Training(nnodes=1, nproc_per_node=2, max_restarts=0)


class Result(NamedTuple):
    record: str
    weights: FlyteDirectory


@task(task_config=LAUNCH)
def finishes(spec: RunSpec, data: FlyteDirectory) -> Result:
    processes = Processes.from_environment()
    processes.connect()
    processes.barrier()
    processes.disconnect()
    return Result(
        f"{processes.rank} of {processes.world_size}, {sorted(os.listdir(data.path))}", FlyteDirectory(data.path)
    )


@task(task_config=LAUNCH)
def is_killed(spec: RunSpec, data: FlyteDirectory) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    return Result("not reached", data)


@task(task_config=LAUNCH)
def is_killed_by_sigterm(spec: RunSpec, data: FlyteDirectory) -> Result:
    os.kill(os.getpid(), signal.SIGTERM)
    return Result("not reached", data)


@task(task_config=LAUNCH)
def is_preempted(spec: RunSpec, data: FlyteDirectory) -> Result:
    try:
        with raise_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
    except Preempted as stop:
        raise FlyteRecoverableException(f"stopped by {stop}") from stop
    return Result("not reached", data)


@task(task_config=LAUNCH)
def whose_pod_is_stopped(spec: RunSpec, data: FlyteDirectory) -> Result:
    configure_logging()
    print("at work")
    if Processes.from_environment().is_main:
        # What the kubelet does: SIGTERM to the pod's first process, the agent.
        os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
    return Result("not reached", data)


@task(task_config=LAUNCH)
def is_misused(spec: RunSpec, data: FlyteDirectory) -> Result:
    if data.path:
        raise ValueError("training.micro_batch_size is too large")
    return Result("not reached", data)


@task(task_config=LAUNCH)
def loses_a_peer(spec: RunSpec, data: FlyteDirectory) -> Result:
    """One process ends by itself, as `spec.name` says, and the other one for that reason."""
    processes = Processes.from_environment()
    processes.connect()
    processes.barrier()
    if not processes.is_main:
        if spec.name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("training.micro_batch_size is too large")
    try:
        processes.barrier()
    except RuntimeError as error:
        raise FlyteRecoverableException("a process lost its peers") from error
    return Result("not reached", data)


@task(task_config=Training(nnodes=1, nproc_per_node=2, max_restarts=2))
def cannot_train(spec: RunSpec, data: FlyteDirectory) -> Result:
    """Each start of a process leaves a line."""
    # Here, since it imports transformers, for which interpreters of the other tasks have no use.
    from tasks.runtime.training import session as training_session

    def session(spec):
        with Path(data.path, "starts").open("a", encoding="utf-8") as file:
            file.write("a start\n")
        raise FileNotFoundError("model.name 'no/model' is not on the Hub")

    training_session.session = session
    train_step.train(spec, Path(data.path))
    return Result("not reached", data)


TASKS = {
    function.task_function.__name__: function
    for function in (
        finishes,
        is_killed,
        is_killed_by_sigterm,
        is_preempted,
        whose_pod_is_stopped,
        is_misused,
        loses_a_peer,
        cannot_train,
    )
}


def run(name: str, folder: Path, how: str, start_method: str) -> Result:
    TASKS[name].task_config.start_method = start_method
    return TASKS[name](spec=RunSpec(name=how, output=str(folder)), data=FlyteDirectory(str(folder)))
