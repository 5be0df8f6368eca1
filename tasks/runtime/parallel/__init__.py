"""How the work is split over processes: one file for each value of `parallel.type`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_kernels_available

from strata_platform.spec import RunSpec
from tasks.runtime.models.build import compute_dtype, model_dtype
from tasks.runtime.parallel.ddp import Ddp
from tasks.runtime.parallel.deepspeed import Deepspeed
from tasks.runtime.parallel.fsdp import Fsdp
from tasks.runtime.parallel.single import Single
from tasks.runtime.process.ranks import Processes

# The package that an attention implementation is in, and its module.
_FLASH = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
}


class Strategy(Protocol):
    """Splits a model over the processes of a job, and averages their gradients."""

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """What a forward pass in training calls: `model`, on this process's device, split. A collective.

        The main process's model has the weights that training starts from, and those of the others are empty; with
        `weights_loaded_later` all are, and are filled later.
        """

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What training calls and steps, given a wrapped model and an optimizer of its parameters. A collective."""

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; only after the step's `last` need gradients be averaged."""

    def clip(self, wrapped: nn.Module, max_norm: float) -> Tensor:
        """Have the step's gradients scaled down to a global norm of `max_norm`, 0 for any; returns the norm before.

        A collective. The norm's value may be filled in by the optimizer's step, which comes next; it is finite before,
        and a strategy that does so does not take a step whose norm is not.
        """

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """Have the optimizer's next step change nothing where `verdict`, a scalar on the device, is 1 and not 0."""


def build_strategy(spec: RunSpec, processes: Processes) -> Strategy:
    """The strategy that `parallel.type` names; a single process has nothing to split."""
    if processes.world_size == 1:
        return Single(processes)
    strategies: dict[str, Callable[[RunSpec, Processes], Strategy]]
    strategies = {"ddp": Ddp, "fsdp": Fsdp, "deepspeed": Deepspeed}
    return strategies[spec.parallel.type](spec, processes)


def require_packages(spec: RunSpec) -> None:
    """Raises ValueError when the run needs a package that is not there."""
    if spec.parallel.type == "deepspeed" and find_spec("deepspeed") is None:
        raise ValueError(
            "parallel.type 'deepspeed' needs the package deepspeed, which is not installed; install strata[deepspeed], "
            "or set parallel.type to 'fsdp', which splits as much"
        )
    if spec.is_quantized and find_spec("bitsandbytes") is None:
        raise ValueError(
            "adapter.quantization 'nf4' needs the package bitsandbytes, which is not installed; install "
            "strata[bitsandbytes], or set adapter.quantization to 'none'"
        )
    if (
        spec.is_quantized
        and spec.parallel.type == "fsdp"
        and compute_dtype(spec) != model_dtype(spec.model)
        # Whose FSDP is known to convert numbers alone.
        and torch.__version__ < "2.15"
    ):
        raise ValueError(
            f"parallel.compute_dtype {spec.parallel.compute_dtype!r} beside adapter.quantization 'nf4' needs PyTorch "
            f"2.15, and this is {torch.__version__}, whose FSDP would convert packed weights, too; set model.dtype to "
            f"{spec.parallel.compute_dtype!r}"
        )
    if spec.optimizer.type == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise ValueError(
            "optimizer.type 'adamw_8bit' needs the package bitsandbytes, which is not installed; install "
            "strata[bitsandbytes], or set optimizer.type to 'adamw'"
        )
    # A part of the package cuda, which may be there without it.
    bound = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
    if spec.optimizer.paged and torch.cuda.is_available() and not bound:
        raise ValueError(
            "optimizer.paged needs the package cuda-bindings, which is not installed; install it, or set "
            "optimizer.paged to false"
        )
    package, module = _FLASH.get(spec.model.attention, ("", ""))
    # In its place transformers takes kernels of the Hub, where the package for those is installed.
    if package and find_spec(module) is None and not is_kernels_available():
        raise ValueError(
            f"model.attention {spec.model.attention!r} needs the package {package}, which is not installed; install "
            "it, or set model.attention to 'sdpa'"
        )
