"""Optimizer steps in the backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Make the backward pass step each parameter as soon as its gradient is complete, and free the gradient.

    The optimizer's own `step` then has nothing to do. Set the learning rate before the backward pass.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(_step_alone, optimizer, number))


def _step_alone(optimizer: torch.optim.Optimizer, number: int, parameter: Tensor) -> None:
    """Step one parameter. `number`: index of its group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    parameter.grad = None
