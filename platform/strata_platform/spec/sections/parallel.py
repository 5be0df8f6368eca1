"""The sections that `parallel` may be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strata_platform.spec.sections.fields import Count, Flag, Integer, Section

GROUPS = ("tensor_parallel", "context_parallel", "expert_parallel")
"""Fields of `Fsdp` that make groups of processes."""


class _DataParallel(Section):
    """Base of the strategies without tensor, context and expert parallelism."""

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel size."""
        return 1

    @property
    def context_parallel(self) -> int:
        """Context-parallel size."""
        return 1

    @property
    def expert_parallel(self) -> int:
        """Expert-parallel size."""
        return 1


class Single(_DataParallel):
    """One process."""

    type: Literal["single"] = Field("single", description="One process.")


class Ddp(_DataParallel):
    """DistributedDataParallel: a full replica per process, gradients averaged."""

    type: Literal["ddp"] = Field("ddp", description="One replica per process.")
    bucket_cap_mb: Integer = Field(25, ge=1, le=65536, description="Size of a gradient bucket, MiB.")


class Fsdp(Section):
    """FSDP2: weights, gradients and optimizer state are sharded over processes and gathered layer by layer."""

    type: Literal["fsdp"] = Field("fsdp", description="One shard of the model per process.")
    reshard_after_forward: Flag = Field(
        True,
        description="Free a layer's gathered weights after its forward pass and gather them again for its backward "
        "pass: less memory, 50 % more traffic.",
    )
    compute_dtype: Literal["model", "bfloat16"] = Field(
        "model",
        description="Data type that layers are gathered and computed in. `bfloat16` with model.dtype `float32` keeps "
        "fp32 weights for the optimizer.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type in which gradients are reduced across ranks."
    )
    cpu_offload: Flag = Field(
        False, description="Keep weights, gradients and optimizer state in host memory, and run the optimizer there."
    )
    replicas: Count = Field(
        1,
        description="Replicas of the model (HSDP), each sharded over processes with adjacent ranks. With one replica "
        "per pod, weights are gathered within a pod and only gradients travel between pods.",
    )
    tensor_parallel: Count = Field(
        1,
        description="Tensor-parallel size: adjacent ranks that share the matrices of each layer and compute the same "
        "rows. Keep a group within one pod.",
    )
    context_parallel: Count = Field(
        1,
        description="Context-parallel size: processes, or tensor-parallel groups, that share each row, for sequences "
        "too long for one.",
    )
    expert_parallel: Count = Field(
        1,
        description="Expert-parallel size: adjacent ranks that share the experts of each layer of a mixture and "
        "exchange tokens instead of gathering the weights of all experts. Keep a group within one pod.",
    )
    context_parallel_method: Literal["auto", "all_gather", "ulysses"] = Field(
        "auto",
        description="How attention sees whole rows under context parallelism: `all_gather` gathers keys and values; "
        "`ulysses` exchanges slices of rows for heads, and each rank attends with its share of the heads; `auto` "
        "takes the one that sends fewer bytes.",
    )


class Deepspeed(_DataParallel):
    """DeepSpeed's ZeRO, with its field names. With model.dtype `bfloat16` the optimizer keeps fp32 weights."""

    type: Literal["deepspeed"] = Field("deepspeed", description="DeepSpeed's ZeRO; needs the extra `deepspeed`.")
    stage: Integer = Field(
        2,
        ge=1,
        le=3,
        description="What is sharded: optimizer state (1), also gradients (2), also weights (3).",
    )
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="Where optimizer state is kept and steps run: on the device, or in host memory."
    )
    offload_param: Literal["none", "cpu"] = Field(
        "none", description="Where stage 3 keeps the sharded weights: on the device, or in host memory."
    )
