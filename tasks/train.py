"""Flyte task: training, in the shape and with the resources that the spec asks for."""

from __future__ import annotations

from flytekit import Resources, dynamic
from flytekit.extras.accelerators import GPUAccelerator
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import RunSpec
from tasks.prepare import SMALL
from tasks.topology import Trained, task_for


# Dynamic, because a task's resources are known only when its spec is: a static node would fix them for all runs.
@dynamic(requests=SMALL)
def train(spec: RunSpec, data: FlyteDirectory) -> Trained:
    """Run the training task of the spec's topology with the spec's resources."""
    pods = Resources(
        cpu=spec.resources.cpu,
        mem=spec.resources.memory,
        gpu=str(spec.resources.gpu) if spec.resources.gpu else None,
    )
    node = task_for(spec.topology)(spec=spec, data=data).with_overrides(
        requests=pods,
        limits=pods,
        shared_memory=spec.resources.shared_memory,
        accelerator=GPUAccelerator(spec.resources.gpu_type) if spec.resources.gpu_type else None,
    )
    return node
