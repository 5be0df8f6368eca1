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
        description="Free a layer's gathered weights after its forward pass, and gather them again for its backward "
        "pass. This saves memory and adds 50 % traffic.",
    )
    compute_dtype: Literal["model", "bfloat16"] = Field(
        "model",
        description="Data type in which weights are gathered and layers compute. `bfloat16` with model.dtype `float32` "
        "keeps fp32 weights for the optimizer.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type in which gradients are reduced across ranks."
    )
    cpu_offload: Flag = Field(
        False, description="Keep weights, gradients and optimizer state in host memory, and run the optimizer there."
    )
    replicas: Count = Field(
        1,
        description="Number of replicas of the model (HSDP), each sharded over processes with adjacent ranks. With one "
        "replica per pod, weights are gathered within a pod, and only gradients are sent between pods.",
    )
    tensor_parallel: Count = Field(
        1,
        description="Tensor-parallel size: adjacent ranks that shard the matrices of each layer and compute the same "
        "rows. Keep a group within one pod.",
    )
    context_parallel: Count = Field(
        1,
        description="Context-parallel size: processes, or tensor-parallel groups, that shard each row, for sequences "
        "too long for one process.",
    )
    expert_parallel: Count = Field(
        1,
        description="Expert-parallel size: adjacent ranks that shard the experts of each mixture-of-experts layer and "
        "exchange tokens, instead of gathering all experts' weights. Keep a group within one pod.",
    )
    context_parallel_method: Literal["auto", "all_gather", "ulysses"] = Field(
        "auto",
        description="How attention sees whole rows under context parallelism. `all_gather` gathers keys and values. "
        "`ulysses` exchanges parts of rows for heads, and each rank computes attention for its heads. `auto` chooses "
        "the method that sends fewer bytes.",
    )


class Deepspeed(_DataParallel):
    """DeepSpeed's ZeRO, with its field names. With model.dtype `bfloat16` the optimizer keeps fp32 weights."""

    type: Literal["deepspeed"] = Field("deepspeed", description="DeepSpeed's ZeRO; needs the extra `deepspeed`.")
    stage: Integer = Field(
        2,
        ge=1,
        le=3,
        description="ZeRO stage. 1 shards the optimizer state, 2 also gradients, 3 also weights.",
    )
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none",
        description="Where the optimizer state is kept and the optimizer runs: on the device (`none`), or in host "
        "memory (`cpu`).",
    )
    offload_param: Literal["none", "cpu"] = Field(
        "none",
        description="Where stage 3 keeps the sharded weights: on the device (`none`), or in host memory (`cpu`).",
    )
