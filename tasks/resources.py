"""Resources and scheduling of the Flyte tasks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from flytekit import Resources
from flytekit.core.base_task import PythonTask
from flytekit.extras.accelerators import GPUAccelerator

from strata_platform.pod_settings import RETRIES, scheduling_labels
from strata_platform.spec.run_spec import Resources as Asked
from tasks.steps.pod_sizes import CONTROL, PREPARE, PodSize


def _task_options(size: PodSize) -> dict[str, Any]:
    """Limits are set apart from requests: without limits, Flyte takes the requests for them."""
    requests, limits = (Resources(cpu=cpu, mem=memory) for cpu, memory in zip(size.cpu, size.memory, strict=True))
    return {"requests": requests, "limits": limits, "retries": RETRIES}


CONTROL_TASK = _task_options(CONTROL)
PREPARE_TASK = _task_options(PREPARE)


def overrides(asked: Asked, *, gpus: int | None = None) -> dict[str, Any]:
    """The spec's resources as overrides of a node, with at most `gpus` of its GPUs."""
    count = asked.gpu if gpus is None else min(asked.gpu, gpus)
    pod = Resources(cpu=asked.cpu, mem=asked.memory, gpu=str(count) if count else None)
    return {
        "requests": pod,
        "limits": pod,
        "shared_memory": asked.shared_memory,
        "accelerator": GPUAccelerator(asked.gpu_type) if asked.gpu_type and count else None,
    }


def with_scheduling(task: PythonTask[Any], asked: Asked, *, trains: bool = False) -> PythonTask[Any]:
    """`task` with the queue, the priority and the pod template of the spec, and its time limit if the task trains.

    Kueue reads labels of the objects that it may hold back: the pod of a single-pod task, the job of any other. Flyte
    takes them from the task and cannot override them per node. So this is a copy of the task, which a dynamic task
    passes on; the pod loads the original by its name, which is the same.
    """
    given = scheduling_labels(asked, trains=trains)
    if not given and asked.pod_template is None:
        return task
    own = copy.copy(task)
    own._metadata = replace(task.metadata, labels=given or None, pod_template_name=asked.pod_template)
    return own
