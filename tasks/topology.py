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
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import CleanPodPolicy, RunPolicy
from kubernetes.client import V1PodSpec

from strata_platform.pod_settings import GRACE_SECONDS, RETRIES
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Topology
from tasks.attempts import retried_by_flyte
from tasks.elastic import Training
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps import train_step as steps


class Trained(NamedTuple):
    """The outputs of a training task."""

    record: CompletionRecord
    weights: FlyteDirectory


def _train(spec: RunSpec, data: FlyteDirectory) -> Trained:
    """Train in one process of the job; Flyte takes the return value of rank 0."""
    with retried_by_flyte():
        record, weights = steps.train(spec, Path(data.path))
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
            max_restarts=steps.MAX_RESTARTS,
            monitor_interval=steps.MONITOR_SECONDS,
            rdzv_configs=steps.RENDEZVOUS,
            # However the job ends, its pods must release their GPUs. Those that have ended keep their logs.
            run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
        ),
        retries=RETRIES,
        environment=steps.ENVIRONMENT,
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
