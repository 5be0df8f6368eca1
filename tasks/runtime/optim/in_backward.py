"""Optimizer steps in the backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Let the backward pass take each parameter's step as soon as it has its gradient, and free that.

    The optimizer's `step` has nothing left to do afterwards; the learning rate must be set before the backward pass.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(_step_alone, optimizer, number))


def _step_alone(optimizer: torch.optim.Optimizer, number: int, parameter: Tensor) -> None:
    """A step of one parameter, which is in the group of this `number`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    parameter.grad = None
