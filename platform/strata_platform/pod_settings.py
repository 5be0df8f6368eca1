"""What every pod that trains gets, whoever starts it: Flyte or Strata's own backend of Kubernetes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from strata_platform import progress_line

if TYPE_CHECKING:
    from strata_platform.spec.run_spec import Resources, Topology

# Attempts after the first. Pods are evicted, preempted and lost, and object stores are unavailable at times. An error
# of the user ends the run at once.
RETRIES = 5
# Longer than any start takes; an attempt may hold its machines for that long beside `resources.time_limit`.
START_SECONDS = 3600
# Seconds from SIGTERM to SIGKILL for a pod. Its workers get less, so that the process that started them outlives them.
GRACE_SECONDS = 120
STOP_SECONDS = GRACE_SECONDS - 20

_GPU = "nvidia.com/gpu"
_SHARED_MEMORY, _SHARED_MEMORY_PATH = "strata-shared-memory", "/dev/shm"  # noqa: S108

SPEC = "STRATA_SPEC"
"""Environment variable with the run spec, in pods that `tasks.runtime.launch` starts in."""

ATTEMPT = "STRATA_ATTEMPT"
"""Environment variable with the number of the attempt, from 0, in pods of a JobSet."""

ATTEMPT_VARIABLES = (ATTEMPT, "FLYTE_ATTEMPT_NUMBER")
"""Those that have it, of any cluster."""

POD_NAME = "STRATA_POD"
"""Environment variable with the name of the pod: the name of its host is the node's under `hostNetwork`."""

QUEUE = "kueue.x-k8s.io/queue-name"
"""Kueue's label with the queue of an object."""

PRIORITY = "kueue.x-k8s.io/priority-class"
"""Kueue's label with the priority class of an object."""

TIME_LIMIT = "kueue.x-k8s.io/max-exec-time-seconds"
"""Kueue's label with the seconds that an object may hold its machines."""

ENVIRONMENT = {
    # A dead peer ends the attempt after minutes instead of NCCL's two hours.
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
    # Stages and metrics reach the client through the pod's log.
    progress_line.VARIABLE: "1",
}


def gpu_resource(asked: Resources) -> str:
    """The resource of the GPUs that a run without Flyte asks for."""
    return asked.gpu_resource or _GPU


def gpu_tolerations(resource: str) -> list[dict[str, str]]:
    """Of the taints that nodes with this GPU resource have."""
    # Nodes whose GPUs are cut into slices have the taint of whole ones.
    taints = dict.fromkeys((f"{resource.partition('/')[0]}/gpu", resource))
    return [{"key": taint, "operator": "Exists", "effect": "NoSchedule"} for taint in taints]


def add_shared_memory(pod: dict[str, Any], size: str) -> None:
    """Mount shared memory into the first container of a pod's spec, through which processes and NCCL exchange data."""
    container = pod["containers"][0]
    mount = {"name": _SHARED_MEMORY, "mountPath": _SHARED_MEMORY_PATH}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    volume = {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    pod["volumes"] = [*(pod.get("volumes") or []), volume]


def scheduling_labels(asked: Resources, *, trains: bool = True) -> dict[str, str]:
    """Kueue's labels of the object that it may hold back: queue, priority, and the time limit if the object trains."""
    # Training ends by itself before. This is for an attempt that never comes to train.
    seconds = str(asked.time_limit + START_SECONDS) if trains and asked.time_limit else None
    labels = {
        QUEUE: asked.queue,
        PRIORITY: asked.priority,
        TIME_LIMIT: seconds,
    }
    return {label: value for label, value in labels.items() if value is not None}


def require_flytes_gpus(resources: Resources) -> None:
    """Raises ValueError for a resource that a task of Flyte's cannot ask for."""
    if resources.gpu_resource is not None:
        raise ValueError(
            f"resources.gpu_resource: {resources.gpu_resource!r} is for runs without Flyte, whose configuration names "
            "the resource of all its runs (plugins.k8s.gpu-resource-name); leave it out, or take the backend kubernetes"
        )


def check_pods(output: str, resources: Resources, topology: Topology) -> list[str]:
    """Warnings of what a single machine has anyway, but pods need: GPUs, and an output folder that outlives them.

    Raises ValueError if the pods would not share their checkpoints.
    """
    warnings = []
    if resources.gpu == 0 and topology.nproc_per_node > 1:
        processes = topology.nproc_per_node
        warnings.append(
            f"resources.gpu is 0: the {processes} processes of each pod train on CPUs; set resources.gpu to "
            f"{processes} for one GPU each"
        )
    if not os.path.isabs(output):
        advice = "set output to a folder on a volume that all pods of the run mount"
        if topology.nnodes > 1:
            raise ValueError(
                f"output {output!r} is a folder inside each pod, but topology.nnodes {topology.nnodes} pods share "
                f"checkpoints; {advice}"
            )
        warnings.append(
            f"output {output!r} is a folder inside each pod: checkpoints vanish with the pod, and a new attempt starts "
            f"from step 0; {advice}"
        )
    return warnings
