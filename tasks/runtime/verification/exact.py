"""The first step in fp64 by plain transformers: the reference for every other way to compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, collator
from tasks.runtime.data.loader import training_loader
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model, freeze_non_text_parameters, set_special_tokens
from tasks.runtime.models.dropout import turn_dropout_off
from tasks.runtime.models.media.media_inputs import with_model_inputs
from tasks.runtime.objectives import ObjectiveContext, build_objective
from tasks.runtime.objectives.distill import Distill
from tasks.runtime.parallel.single import Single
from tasks.runtime.process.ranks import Processes
from tasks.runtime.verification.observe import Step
from tasks.runtime.verification.subject import changed


class InDouble(TorchFunctionMode):
    """Turns casts to fp32, which norms, softmax and losses make for precision, into casts to fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            func = Tensor.double
        if func is Tensor.to:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **kwargs)


def exact_step(spec: RunSpec, data: PreparedData) -> Step:
    """Loss and gradients of the first step in fp64, from weights rounded to the dtype of `spec`."""
    spec = changed(
        spec, {"kernels": {"enabled": False}, "model": {"attention": _plain_attention(spec.model.attention)}}
    )
    processes = Processes()
    model = build_model(spec.model, spec.seed)
    add_adapter(model, spec.adapter, spec.seed)
    model = in_double(model, data, processes.device)
    objective = build_objective(spec, fused=False)
    with InDouble():
        start = ObjectiveContext(spec, processes, data, Single(processes), model, "exact", continues=False)
        data = objective.prepare(start)
        # The teacher of a distillation computes in fp64, too.
        if isinstance(objective, Distill) and objective.teacher is not None and objective.teacher.model is not None:
            objective.teacher.model.double()
        collate = with_model_inputs(collator(spec.model.attention), model, data)
        batches = list(training_loader(spec, data, processes, collate=collate, start=0, stop=1))
        batches = [{name: tensor.to(processes.device) for name, tensor in batch.items()} for batch in batches]
        items = torch.stack([objective.count(batch) for batch in batches]).sum()
        objective.before_step(model, batches, processes)
        loss = 0.0
        for batch in batches:
            share = objective.micro_batch_loss(model, batch, items).loss
            share.backward()
            loss += float(share.detach())
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return Step(loss, gradients)


def in_double(model: PreTrainedModel, data: PreparedData, device: torch.device) -> PreTrainedModel:
    """The model in fp64 on `device`, ready to train without dropout."""
    set_special_tokens(model, data.tokenizer())
    if not data.manifest.has_media:
        freeze_non_text_parameters(model)
    turn_dropout_off(model)
    return model.double().to(device).train()


def _plain_attention(attention: str) -> str:
    """The attention implementation in fp64, which flash attention does not support."""
    return "auto" if attention.startswith("flash") else attention


def error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the differences."""
    return float((found.to(exact.device, torch.float64) - exact.double()).square().mean().sqrt())


def scale(tensors: Iterable[Tensor]) -> float:
    """Root mean square of all values."""
    tensors = list(tensors)
    total = sum(float(tensor.double().square().sum()) for tensor in tensors)
    return float((total / max(1, sum(tensor.numel() for tensor in tensors))) ** 0.5)
