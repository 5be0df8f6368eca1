"""Gradients between the backward pass and the optimizer's step: clip them, or skip the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from tasks.runtime.optim.rounding import local

# Of `nn.utils.clip_grads_with_norm_`.
_CLIP_EPS = 1e-6
# Numbers whose squares a CPU adds with an error of 1e-5.
_CPU_PART = 1 << 20
# Numbers that are scaled at a time.
_SCALED_PART = 1 << 26


def skip_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make the next step change nothing if `skip`, an fp32 scalar, is 1.

    If the optimizer's kernels take `found_inf`, as for PyTorch's gradient scaling, the device decides. Otherwise the
    host waits for `skip` and drops the gradients; a parameter without a gradient is not stepped.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # A blocking copy: a step on the host would not wait for an asynchronous one.
        optimizer.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device)  # type: ignore[attr-defined]
    elif skip.item():
        optimizer.zero_grad()


def clip_gradients(model: nn.Module, max_norm: float, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Scale gradients down to a global norm of `max_norm` (0: no limit). Returns the norm before, an fp32 scalar. A
    collective if the parameters are sharded.

    An `optimizer` with a `gradient_scale` scales them itself in its next step, with the same bits.
    """
    learned = [parameter for parameter in model.parameters() if parameter.grad is not None]
    total = _total_norm([parameter.grad for parameter in learned if parameter.grad is not None])
    if max_norm and optimizer is not None and hasattr(optimizer, "gradient_scale"):
        optimizer.gradient_scale = clip_factor(total, max_norm).to(optimizer.param_groups[0]["params"][0].device)
        return total
    if max_norm:
        scale_gradients(learned, clip_factor(total, max_norm))
    return total


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients by an fp32 scalar, in fp32, and round each product once.

    `gradient.mul_(factor)` does so on a CPU; on a GPU it rounds the factor of bf16 gradients to bf16 first, so that
    `nn.utils.clip_grads_with_norm_` is off by up to 0.2 %.
    """
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        own = factor.to(gradient.device)
        if gradient.dtype == own.dtype:
            gradient.mul_(own)
            continue
        # In parts, whose copies in fp32 are small beside the gradients.
        rows = torch.atleast_1d(gradient)
        for part in rows.split(max(1, _SCALED_PART * len(rows) // max(1, rows.numel()))):
            part.copy_(part.to(own.dtype).mul_(own))


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """As `nn.utils.get_total_norm`, also of DTensors with several meshes and placements, but summed and returned in
    fp32.

    PyTorch's is off by up to 0.4 % for bf16 gradients, whose norm it rounds to bf16, and by 1 % for 100 million numbers
    on a CPU, which adds them one after another.
    """
    groups: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        sharding = (gradient.device_mesh, tuple(gradient.placements)) if isinstance(gradient, DTensor) else None
        groups.setdefault(sharding, []).append(local(gradient))
    norms = []
    for sharding, alike in groups.items():
        norm = torch.stack(local_norms(alike)).norm()
        for dimension, placement in enumerate(sharding[1] if sharding else ()):
            assert not placement.is_partial(), placement
            if sharding and not placement.is_replicate():
                square = norm.square()
                dist.all_reduce(square, group=sharding[0].get_group(dimension))
                norm = square.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def local_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms of plain tensors in fp32; on a CPU, of their parts. On a GPU one kernel for all, also fast for one."""
    if tensors[0].device.type == "cpu":
        tensors = [part for tensor in tensors for part in tensor.reshape(-1).split(_CPU_PART)]
    return list(torch._foreach_norm(tensors, 2, torch.float32))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this global norm are multiplied by, as `nn.utils.clip_grads_with_norm_`: an fp32 scalar."""
    return (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0).float()


def used_gradient(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The gradient that the optimizer's next step uses: clipped, also where that step does it."""
    scale: Tensor | None = getattr(optimizer, "gradient_scale", None)
    if parameter.grad is None or scale is None:
        return parameter.grad
    return (parameter.grad.float() * scale).to(parameter.grad.dtype)
