"""Add the gradients of a step's micro-batches in fp32.

A sum of many bf16 gradients in bf16 loses addends that are small beside it; docs/benchmarks/precision.md has errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.parallel import Deepspeed
from strata_platform.spec.sections.training import Training
from tasks.runtime.optim.rounding import has_bfloat16, local


def gradient_sums(model: nn.Module, training: Training, parallel: Parallel) -> GradientSums | None:
    """The sums of a run; None if its backward passes add to the parameters' gradients.

    Stages 2 and 3 of DeepSpeed reduce gradients after each backward pass, into buffers of the engine.
    """
    by_engine = isinstance(parallel, Deepspeed) and parallel.stage > 1
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return GradientSums() if training.sums_in_float32 and has_bfloat16(trained) and not by_engine else None


class GradientSums:
    """Sums of the gradients of all micro-batches of a step but the last, in fp32.

    Before the last backward pass each sum becomes the gradient of its parameter, rounded once to the parameter's dtype,
    and the pass adds to it. Strategies, clipping and optimizers find gradients as they would be without sums. A
    parameter takes 4 bytes between two passes, instead of 2 for a gradient in bf16.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.active = False
        """Whether gradients are moved to the sums: in every backward pass of a step but the last."""

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of `parameters`, once the strategy has wrapped the model.

        Those of fp32 parameters as well: CUDA graphs hand over the gradients of all parameters together.
        """
        for parameter in parameters:
            if parameter.requires_grad:
                # FSDP calls it for a shard when its gradient is reduced.
                parameter.register_post_accumulate_grad_hook(self._move)

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch."""
        if last:
            self._round()
        self.active = not last
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients in place that a backward pass computes now."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    @torch.no_grad()
    def add(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the sums of parameters."""
        for parameter, gradient in gradients.items():
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient.to(torch.float32, copy=True)

    def _move(self, parameter: Tensor) -> None:
        """Add the gradient to the parameter's sum, and let it go."""
        assert isinstance(parameter, nn.Parameter)
        if self.active:
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            if gradient.device.type == "cpu" and torch.cuda.is_available():
                # With `parallel.cpu_offload`, FSDP of PyTorch before 2.15 may still be copying it to host memory.
                torch.cuda.current_stream().synchronize()
            self.add({parameter: gradient})
            parameter.grad = None

    @torch.no_grad()
    def _round(self) -> None:
        while self._sums:
            parameter, total = self._sums.popitem()
            parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(total)
