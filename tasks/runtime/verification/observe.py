"""Observes steps of the real training code: `train` with the spec's framework, and access to its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint.state import FlatStateOptimizer
from tasks.runtime.data import PreparedData
from tasks.runtime.models.dropout import turn_dropout_off
from tasks.runtime.training.frameworks import load_framework
from tasks.runtime.training.job import Framework, Job
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train


@dataclass
class Step:
    """The first step of a run, up to its gradients."""

    loss: float
    gradients: dict[str, Tensor]
    """Gradients of trainable parameters, unsharded and unclipped; zeros if the backward pass left none."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that are not in the state dict, on the CPU."""


class _Seen(Exception):
    """Ends the run after the observation."""


def first_step(spec: RunSpec, data: PreparedData) -> Step:
    """Run the first step of `spec` without its update. A collective if there are several processes."""
    seen: list[Step] = []

    def look(job: Job) -> Tensor | None:
        seen.append(Step(_loss(job), _gradients(job), plain_buffers(job.unwrapped_model)))
        raise _Seen

    def framework(job: Job) -> None:
        # Runs that differ in any way would draw different random numbers.
        turn_dropout_off(job.unwrapped_model)
        vars(job)["clip_gradients"] = lambda: look(job)
        load_framework(spec.runtime.framework)(job)

    _leave_when_seen(spec, data, framework)
    return seen[0]


def with_job(spec: RunSpec, data: PreparedData, look: Callable[[Job], None]) -> None:
    """Build the job of `spec` as training does, call `look` with it, and take no step."""

    def framework(job: Job) -> None:
        # Runs that differ in any way would draw different random numbers.
        turn_dropout_off(job.unwrapped_model)
        job.begin()
        look(job)
        raise _Seen

    _leave_when_seen(spec, data, framework)


def _leave_when_seen(spec: RunSpec, data: PreparedData, framework: Framework) -> None:
    with session(spec) as run:
        try:
            train(run, data, framework)
        except _Seen:
            return
    raise RuntimeError("the framework ended before the first optimizer step")


def _loss(job: Job) -> float:
    """The loss of the step over all processes."""
    loss = job.recorder.local_loss.double()
    if job.processes.world_size > 1:
        dist.all_reduce(loss)
    return float(loss) / job.processes.tp_size


def _gradients(job: Job) -> dict[str, Tensor]:
    named = job.unwrapped_model.named_parameters()
    return {name: _whole(_gradient(job, p)).clone() for name, p in named if p.requires_grad}


def _gradient(job: Job, parameter: nn.Parameter) -> Tensor:
    if isinstance(job.optimizer, FlatStateOptimizer):
        # DeepSpeed keeps gradients in buffers of its engine.
        from deepspeed.utils import safe_get_full_grad

        found: Tensor | None = safe_get_full_grad(parameter)
        return torch.zeros_like(parameter) if found is None else found
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _whole(tensor: Tensor) -> Tensor:
    """The unsharded tensor. A collective for a DTensor."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def plain_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers outside of the state dict, such as `inv_freq`, which loading weights does not set."""
    return {
        f"{path}.{name}".removeprefix("."): buffer.detach().cpu().clone()
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Hide log lines of the runtime and progress bars, which would disturb the report."""
    import logging

    from transformers.utils import logging as transformers_logging

    loggers: list[tuple[Any, int]] = [(logging.getLogger(name), 0) for name in ("tasks", "strata_kernels")]
    loggers = [(logger, logger.level) for logger, _ in loggers]
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity_warning()
