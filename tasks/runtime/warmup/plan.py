"""What a run compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from strata_kernels.warmup import Plan, record
from strata_kernels.warmup.model import plan_optimizer, record_counts
from strata_platform.spec import RunSpec
from tasks.runtime.data import collator
from tasks.runtime.models.build import build_planning_model, has_fused_loss, model_dtype, prepare_for_training
from tasks.runtime.models.lora import add_adapter
from tasks.runtime.models.varlen_attention import set_varlen_attention, uses_varlen
from tasks.runtime.objectives import build_objective
from tasks.runtime.optim.rounding import ROUNDINGS
from tasks.runtime.parallel.tensor import apply_tensor_parallel


def plan_kernels(spec: RunSpec) -> Plan:
    """Every kernel that a training step of this spec launches, found by running the real step on meta tensors."""
    model = build_planning_model(spec)
    add_adapter(model, spec)
    objective = build_objective(spec, fused=has_fused_loss(prepare_for_training(model, spec)))
    model.train()
    row = objective.example_row(_meta(spec.data.sequence_length // spec.context_parallel))
    batch = collator(spec.model.attention)([row] * spec.training.micro_batch_size)
    rows, length = batch["input_ids"].shape
    # Given whole, because transformers makes the mask of packed rows by looking at their values, and here are none.
    batch["attention_mask"] = _meta(rows, 1, length, length, dtype=torch.bool)

    def step(max_targets: int | None) -> None:
        objective.micro_batch_loss(model, batch, objective.count(batch), max_targets).loss.backward()

    with _sharded_as_in_training(model, spec):
        plan = record_counts(model, rows * length, step)
        if uses_varlen(spec, model.config, torch.device("cuda")):
            # Where a row has several documents, what attention makes lies in memory otherwise than under a mask.
            set_varlen_attention(model)
            ends = _meta(2, rows + 2, dtype=torch.int32)
            batch |= {
                "sequence_starts": batch["position_ids"],
                "cu_seqlens": ends,
                "max_seqlen": _meta(length, 0),
            }
            plan += record(lambda: step(None))
    return plan + _optimizer_plan(spec)


def _optimizer_plan(spec: RunSpec) -> Plan:
    if model_dtype(spec) != torch.bfloat16 or spec.parallel.type == "deepspeed":
        # PyTorch's own optimizer.
        return Plan(())
    return plan_optimizer(ROUNDINGS[spec.optimizer.precision], weights_alone=spec.optimizer.type != "adamw")


@contextmanager
def _sharded_as_in_training(model: PreTrainedModel, spec: RunSpec) -> Iterator[None]:
    """Inside of the block `model` is what one process has of it; its peers are made up, and told nothing."""
    ways = spec.tensor_parallel
    if ways == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=ways, store=FakeStore())
    try:
        apply_tensor_parallel(model, init_device_mesh("cpu", (ways,)), whole_logits=not spec.fused_loss)
        yield
    finally:
        dist.destroy_process_group()


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")
