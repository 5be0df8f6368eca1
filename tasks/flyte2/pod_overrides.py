"""What Flyte 2 makes pods of: image, resources, template and labels, from the same sources as for Flyte 1."""

from __future__ import annotations

from typing import Any

import flyte
from flyte import Device, PodTemplate

from strata_platform.pod_settings import GRACE_SECONDS, scheduling_labels
from strata_platform.spec.run_spec import Resources, Topology
from tasks.steps.pod_sizes import PodSize
from tasks.steps.train_step import MAX_RESTARTS, MONITOR_SECONDS, RENDEZVOUS

IMAGE = flyte.Image.from_ref_name()
"""The image of `flyte run --image`."""


def size(pod: PodSize) -> flyte.Resources:
    """The requests and limits of a pod that does not train."""
    return flyte.Resources(cpu=pod.cpu, memory=pod.memory)


def overrides(asked: Resources, *, gpus: int | None = None, trains: bool = False) -> dict[str, Any]:
    """The spec's resources as overrides of a call of a task, with at most `gpus` of its GPUs."""
    count = asked.gpu if gpus is None else min(asked.gpu, gpus)
    gpu = Device(count, "GPU", asked.gpu_type) if count and asked.gpu_type else count or None
    return {
        "resources": flyte.Resources(
            cpu=(asked.cpu, asked.cpu), memory=(asked.memory, asked.memory), gpu=gpu, shm=asked.shared_memory
        ),
        "pod_template": pod_template(asked, trains=trains),
    }


def pod_template(asked: Resources, *, trains: bool) -> str | PodTemplate:
    """The name of the spec's pod template, or else one with Kueue's labels and time to stop in.

    Flyte puts the labels on the pod of a single-pod task and on the job of any other, which is what Kueue holds back.
    Raises ValueError if the spec names a template and asks for labels: a task of Flyte 2 has either.
    """
    labels = scheduling_labels(asked, trains=trains)
    if asked.pod_template is None:
        return PodTemplate(labels=labels or None).with_termination_grace_period(GRACE_SECONDS)
    if labels:
        fields = ", ".join(
            f"resources.{field}" for field in ("queue", "priority", "time_limit") if getattr(asked, field) is not None
        )
        raise ValueError(
            f"resources.pod_template is {asked.pod_template!r}, and {fields} need labels: a task of Flyte 2 has a "
            "template's name or labels; put Kueue's labels into the template and leave out one of the two"
        )
    return asked.pod_template


def job(topology: Topology) -> Any:
    """The configuration of a PyTorchJob of so many pods, for Flyte 2's PyTorch plugin; None for one pod."""
    if topology.nnodes == 1:
        return None
    # Imported here: the plugin imports torch.
    from flyteplugins.pytorch.task import Elastic, RunPolicy

    return Elastic(
        nnodes=topology.nnodes,
        nproc_per_node=topology.nproc_per_node,
        max_restarts=MAX_RESTARTS,
        monitor_interval=MONITOR_SECONDS,
        rdzv_configs=dict(RENDEZVOUS),
        # However the job ends, its pods must release their GPUs. Those that have ended keep their logs.
        run_policy=RunPolicy(clean_pod_policy="Running"),
    )
