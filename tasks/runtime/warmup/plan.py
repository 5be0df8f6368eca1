"""The plan of a run: every kernel that a training step or an evaluation launches, found before the run has a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from strata_kernels.warmup import Plan, record
from strata_kernels.warmup.plan_model import plan_optimizer, record_row_buckets
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Parallel
from tasks.runtime.data import collator
from tasks.runtime.data.dataset import Batch
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_planning_model, has_fused_loss
from tasks.runtime.models.config import compute_dtype, has_router_loss, model_dtype
from tasks.runtime.models.float8 import quantize_frozen_weights
from tasks.runtime.objectives import build_validation_objective
from tasks.runtime.objectives.distill import Distill
from tasks.runtime.objectives.objective import model_inputs
from tasks.runtime.objectives.training_step import TrainingStep, build_training_step
from tasks.runtime.optim.rounding import ROUNDINGS
from tasks.runtime.parallel.expert import apply_expert_parallel
from tasks.runtime.parallel.tensor import apply_tensor_parallel
from tasks.runtime.process.ranks import Processes


def plan_kernels(spec: RunSpec) -> Plan:
    """Run the training step of `spec` on meta tensors and record every kernel that it launches.

    Training builds its step by the same `build_training_step`, so the plan follows what training does.
    """
    model = build_planning_model(spec.model, compute_dtype(spec.model, spec.parallel))
    add_adapter(model, spec.adapter, spec.seed)
    step = build_training_step(model, spec, torch.device("cuda"))
    quantize_frozen_weights(model, spec, torch.device("meta"))
    model.train()
    first, *others = _batches(step, spec)

    def forward_backward(batch: Batch, max_targets: int | None = None) -> None:
        items = step.objective.count(batch)
        step.objective.before_step(model, [batch], Processes(), max_targets)
        step.objective.micro_batch_loss(model, batch, items, max_targets).loss.backward()

    def evaluate(batch: Batch) -> None:
        objective = build_validation_objective(spec, fused=has_fused_loss(step.patched))
        objective.before_step(model, [batch], Processes())
        objective.micro_batch_loss(model, batch, objective.count(batch))

    teacher = step.objective.teacher if isinstance(step.objective, Distill) else None
    sharded = [model] if teacher is None or teacher.model is None else [model, teacher.model]
    with _sharded_as_in_training(sharded, spec.parallel, fused_loss=spec.fused_loss):
        tokens = first["input_ids"].numel()
        plan = record_row_buckets(model, tokens, partial(forward_backward, first))
        for batch in others:
            plan += record(partial(forward_backward, batch))
        if has_router_loss(spec.model) and spec.training.gradient_accumulation_steps > 1:
            # Without gradients, operators launch other variants of their kernels.
            with torch.no_grad():
                for batch in (first, *others):
                    plan += record(partial(model, **model_inputs(batch), logits_to_keep=1))
        if spec.evaluation.interval_field:
            # Without gradients, operators launch other variants of their kernels.
            model.eval()
            with torch.no_grad():
                for batch in (first, *others):
                    plan += record(partial(evaluate, batch))
    return plan + _optimizer_plan(spec)


def _optimizer_plan(spec: RunSpec) -> Plan:
    if model_dtype(spec.model) != torch.bfloat16 or spec.parallel.type == "deepspeed":
        # PyTorch's own optimizer steps the weights.
        return Plan(())
    return plan_optimizer(
        ROUNDINGS[spec.optimizer.precision],
        weights_alone=spec.optimizer.type not in ("adamw", "adamw_8bit"),
        eight_bits=spec.optimizer.type == "adamw_8bit",
        columns=spec.parallel.tensor_parallel * spec.parallel.expert_parallel > 1,
    )


def _batches(step: TrainingStep, spec: RunSpec) -> list[Batch]:
    """Batches on the meta device, one for each path that attention takes in training."""
    row = step.objective.example_row(_meta(spec.data.sequence_length // spec.parallel.context_parallel))
    batch = collator(spec.model.attention)([row] * spec.training.micro_batch_size)
    rows, length = batch["input_ids"].shape
    # transformers derives the mask of packed rows from the values of `position_ids`, and meta tensors have no values.
    batch["attention_mask"] = _meta(rows, 1, length, length, dtype=torch.bool)
    if not step.varlen:
        return [batch]
    # One sequence in each row, and one more. The two paths leave the output and the gradients of attention in memory
    # in different layouts, and the layout is a part of a kernel's key.
    return [
        {
            **batch,
            "sequence_starts": batch["position_ids"],
            "cu_seqlens": _meta(2, sequences + 1, dtype=torch.int32),
            "max_seqlen": _meta(length, 0),
        }
        for sequences in (rows, rows + 1)
    ]


@contextmanager
def _sharded_as_in_training(
    models: Sequence[PreTrainedModel], parallel: Parallel, *, fused_loss: bool
) -> Iterator[None]:
    """Within the block, `models` are shards of one rank of a tensor- or expert-parallel group. Other ranks are fake."""
    tp_size, ep_size = parallel.tensor_parallel, parallel.expert_parallel
    if tp_size * ep_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=tp_size * ep_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (tp_size * ep_size,))
        for model in models:
            if tp_size > 1:
                apply_tensor_parallel(model, mesh, whole_logits=not fused_loss)
            else:
                apply_expert_parallel(model, mesh)
        yield
    finally:
        dist.destroy_process_group()


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")
