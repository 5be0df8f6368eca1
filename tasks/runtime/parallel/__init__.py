"""Distribution strategies: one file for each value of `parallel.type`, and tensor, context and expert parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_kernels_available

from strata_platform.spec import RunSpec
from strata_platform.spec.sections import parallel as settings
from tasks.runtime.models.config import compute_dtype, model_dtype
from tasks.runtime.parallel.ddp import Ddp
from tasks.runtime.parallel.deepspeed import Deepspeed
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.parallel.single import Single
from tasks.runtime.parallel.whole_model import WholeModel
from tasks.runtime.process.ranks import Processes

# optimizer: (module, extra)
_OPTIMIZERS = {
    "lion": ("bitsandbytes", "bitsandbytes"),
    "schedule_free": ("schedulefree", "schedule-free"),
}
# attention implementation: (distribution, module)
_FLASH = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
}


class Strategy(Protocol):
    """Distributes a model over the ranks of a job and averages their gradients."""

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """Move `model` to this rank's device and shard or replicate it. A collective.

        Rank 0 passes a model with the initial weights, and the other ranks one on the meta device. With
        `weights_loaded_later` every rank passes a meta model, and a checkpoint fills it after this call.

        Returns:
            The module that a training forward pass calls.
        """

    def whole_model(self, model: PreTrainedModel) -> WholeModel:
        """A model with whole weights on each rank, for passes that are no collective. Called before `wrap`, with the
        model that `wrap` gets.
        """

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Combine the wrapped model with an optimizer of its parameters. A collective.

        Returns:
            The module that training calls and the optimizer that it steps.
        """

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward pass of a micro-batch. Only the `last` one of a step has to average
        gradients.
        """

    def clip(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Make the next step use gradients that are scaled down to a global norm of `max_norm`; 0 sets no limit. A
        collective.

        Returns:
            The norm before clipping. It may be filled in by the optimizer's step that follows. Until then it is finite,
            and such a strategy skips a step whose norm is not finite.
        """

    def evaluation(self, wrapped: nn.Module) -> AbstractContextManager[nn.Module]:
        """Wrap forward passes without gradients between two steps. Yields the module to call."""

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """Make the optimizer's next step change nothing if `skip` is 1; `skip` is a scalar, 0 or 1, on the device."""


def build_strategy(spec: RunSpec, processes: Processes) -> Strategy:
    """The strategy that `parallel.type` names, or `Single` for a job of one process."""
    if processes.world_size == 1:
        return Single(processes)
    match spec.parallel:
        case settings.Ddp():
            return Ddp(spec.parallel, processes)
        case settings.Fsdp():
            return Fsdp(spec, processes)
        case settings.Deepspeed():
            return Deepspeed(spec, processes)
    raise AssertionError(f"{processes.world_size} processes under parallel.type {spec.parallel.type!r}")


def require_packages(spec: RunSpec) -> None:
    """Raises ValueError if an optional package that the spec needs is not installed."""
    if spec.parallel.type == "deepspeed" and find_spec("deepspeed") is None:
        raise ValueError(
            "parallel.type 'deepspeed' needs the package deepspeed, which is not installed; install "
            "strata[deepspeed], or set parallel.type to 'fsdp', which shards as much"
        )
    if spec.is_quantized and find_spec("bitsandbytes") is None:
        raise ValueError(
            "adapter.quantization 'nf4' needs the package bitsandbytes, which is not installed; install "
            "strata[bitsandbytes], or set adapter.quantization to 'none'"
        )
    if (
        spec.is_quantized
        and spec.parallel.type == "fsdp"
        and compute_dtype(spec.model, spec.parallel) != model_dtype(spec.model)
        # FSDP of PyTorch 2.15 converts only floating-point parameters.
        and torch.__version__ < "2.15"
    ):
        raise ValueError(
            f"parallel.compute_dtype {spec.parallel.compute_dtype!r} with adapter.quantization 'nf4' needs PyTorch "
            f"2.15, because FSDP of {torch.__version__} would convert packed weights; set model.dtype to "
            f"{spec.parallel.compute_dtype!r}"
        )
    module, extra = _OPTIMIZERS.get(spec.optimizer.type, ("", ""))
    if module and find_spec(module) is None:
        raise ValueError(
            f"optimizer.type {spec.optimizer.type!r} needs the package {module}, which is not installed; install "
            f"strata[{extra}], or set optimizer.type to 'adamw'"
        )
    # cuda.bindings is a part of the package cuda, which can be installed without it.
    bound = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
    if spec.optimizer.paged and torch.cuda.is_available() and not bound:
        raise ValueError(
            "optimizer.paged needs the package cuda-bindings, which is not installed; install it, or set "
            "optimizer.paged to false"
        )
    package, module = _FLASH.get(spec.model.attention, ("", ""))
    # If the package `kernels` is installed, transformers downloads flash attention from the Hub instead.
    if package and find_spec(module) is None and not is_kernels_available():
        raise ValueError(
            f"model.attention {spec.model.attention!r} needs the package {package}, which is not installed; install "
            "it, or set model.attention to 'auto'"
        )
