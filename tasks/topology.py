"""The topologies of training jobs, each with a Flyte task of its own: Flyte fixes a task's topology at registration.

`SHAPES` states each topology once. It makes the task's elastic configuration, and the spec's topology selects the task;
so the launched processes always match what the trainer expects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import PodTemplate, task
from flytekit.core.base_task import PythonTask
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import CleanPodPolicy, RunPolicy
from kubernetes.client import V1PodSpec

from strata_platform import pod_settings
from strata_platform.pod_settings import GRACE_SECONDS, RETRIES, STOP_SECONDS
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Topology
from tasks.elastic import Training
from tasks.runtime.metrics import startup
from tasks.runtime.process.error_explanations import reason_to_retry
from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted, die_with_agent
from tasks.runtime.run_folder.record import CompletionRecord

# Restarts of a pod's processes before the attempt fails. A new process takes seconds, a new pod minutes.
MAX_RESTARTS = 2
# Seconds between two looks of the agent at its processes. torch's 5 s are lost at the end of each run.
MONITOR_SECONDS = 1
ENVIRONMENT = {
    **pod_settings.ENVIRONMENT,
    # torch 2.11 ignores the variable and gives workers 30 s.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(STOP_SECONDS),
}


class Trained(NamedTuple):
    """The outputs of a training task."""

    record: CompletionRecord
    weights: FlyteDirectory


def _train(spec: RunSpec, data: FlyteDirectory) -> Trained:
    """Train in one process of the job; Flyte takes the return value of rank 0."""
    configure_logging()
    # Before torch is imported: an agent that is killed meanwhile would leave this process behind.
    die_with_agent()
    startup.mark_process()
    with uncollected():
        from torch import OutOfMemoryError

        from tasks.runtime.data import open_prepared
        from tasks.runtime.models.trained_weights import collect_weights
        from tasks.runtime.training.session import session
        from tasks.runtime.training.train import train

    try:
        with session(spec) as run:
            record = train(run, open_prepared(Path(data.path), spec.data))
            weights = collect_weights(run.folder, spec.adapter, record) if run.processes.is_main else run.folder.root
    except Preempted as signal_name:
        raise FlyteRecoverableException(f"stopped by {signal_name} before the last step") from signal_name
    except (RuntimeError, OSError) as error:
        meaning = reason_to_retry(error, spec.topology.world_size)
        if meaning is None or isinstance(error, OutOfMemoryError):
            raise
        raise FlyteRecoverableException(f"{meaning}: {error}") from error
    return Trained(record, FlyteDirectory(str(weights)))


SHAPES = (
    (1, 1),
    (1, 2),
    (1, 4),
    (1, 8),
    (2, 1),
    (2, 2),
    (2, 4),
    (2, 8),
    (4, 8),
    (8, 8),
    (16, 8),
    (32, 8),
    (64, 8),
    (128, 8),
)
"""Pods, and processes per pod."""


def _name(nnodes: int, nproc_per_node: int) -> str:
    return f"train_{nnodes}x{nproc_per_node}"


def __getattr__(name: str) -> PythonTask[Any]:
    """`train_<nnodes>x<nproc_per_node>`: the task that Flyte loads in a pod.

    Each is made on first use: making one takes 0.1 s, and every process of a run loads this module.
    """
    for shape in SHAPES:
        if name == _name(*shape):
            return training_task(*shape)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def training_task(nnodes: int, nproc_per_node: int) -> PythonTask[Any]:
    """The task for a topology."""

    @wraps(_train)
    def function(spec: RunSpec, data: FlyteDirectory) -> Trained:
        return _train(spec, data)

    function.__name__ = function.__qualname__ = _name(nnodes, nproc_per_node)
    decorate: Callable[..., PythonTask[Any]] = task(
        task_config=Training(
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            max_restarts=MAX_RESTARTS,
            monitor_interval=MONITOR_SECONDS,
            # Without read_timeout a slow first pod breaks the rendezvous of the others.
            rdzv_configs={"timeout": 900, "join_timeout": 900, "read_timeout": 900},
            # However the job ends, its pods must release their GPUs. Those that have ended keep their logs.
            run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        ),
        retries=RETRIES,
        environment=ENVIRONMENT,
        pod_template=PodTemplate(pod_spec=V1PodSpec(containers=[], termination_grace_period_seconds=GRACE_SECONDS)),
    )
    made = decorate(function)
    # Otherwise Flyte names the task after the module that was loading when it was made.
    made._instantiated_in = __name__
    return made


def task_for(topology: Topology) -> PythonTask[Any]:
    """The training task for a topology. Raises ValueError if there is none."""
    shape = (topology.nnodes, topology.nproc_per_node)
    if shape not in SHAPES:
        known = ", ".join(f"{nnodes}x{nproc}" for nnodes, nproc in SHAPES)
        raise ValueError(
            f"topology.nnodes x topology.nproc_per_node is {shape[0]}x{shape[1]}, which has no Flyte task; use "
            f"one of {known}, or add a line to tasks/topology.py"
        )
    return training_task(*shape)
