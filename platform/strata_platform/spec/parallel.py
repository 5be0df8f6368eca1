"""How work may be split over processes: the sections that `parallel` may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strata_platform.spec.fields import Count, Flag, Integer, Section


class Single(Section):
    """One process."""

    type: Literal["single"] = Field("single", description="One process.")


class Ddp(Section):
    """DistributedDataParallel: a full replica per process, gradients averaged."""

    type: Literal["ddp"] = Field("ddp", description="One replica per process.")
    bucket_cap_mb: Count = Field(25, description="Size of a gradient bucket, MiB.")


class Fsdp(Section):
    """FSDP2: weights, gradients and optimizer state split over the processes, and gathered layer by layer."""

    type: Literal["fsdp"] = Field("fsdp", description="A part of the model per process.")
    reshard_after_forward: Flag = Field(
        True,
        description="Free a layer's gathered weights after its forward pass and gather them again for its backward "
        "pass: less memory, half as much traffic again.",
    )
    compute_dtype: Literal["model", "bfloat16"] = Field(
        "model",
        description="Type that layers are gathered in and compute in. `bfloat16` under model.dtype `float32` keeps "
        "exact weights for the optimizer.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type that gradients are summed over processes in."
    )
    cpu_offload: Flag = Field(
        False, description="Keep weights, gradients and optimizer state in host memory, and take steps there."
    )
    replicas: Count = Field(
        1,
        description="Copies of the model (HSDP), each split over processes of its own, which are next to each other by "
        "rank. With a copy per pod, weights are gathered within a pod and only gradients travel between pods.",
    )
    tensor_parallel: Count = Field(
        1,
        description="Processes, next to each other by rank, that each matrix is cut over (tensor parallelism): they "
        "compute the same rows together. Those of a group belong in one pod.",
    )
    context_parallel: Count = Field(
        1,
        description="Processes, or groups by `tensor_parallel`, that each row is cut over (context parallelism), for "
        "rows that are too long for one.",
    )


class Deepspeed(Section):
    """ZeRO by DeepSpeed, whose names the fields have. Under model.dtype `bfloat16` the optimizer has fp32 weights."""

    type: Literal["deepspeed"] = Field("deepspeed", description="ZeRO, by DeepSpeed; needs the extra `deepspeed`.")
    stage: Integer = Field(
        2,
        ge=1,
        le=3,
        description="What is split over processes: optimizer state (1), gradients as well (2), weights as well (3).",
    )
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="Where optimizer state is kept and steps are taken: on the device, or in host memory."
    )
    offload_param: Literal["none", "cpu"] = Field(
        "none", description="Where the weights that stage 3 has split are kept: on the device, or in host memory."
    )
