"""Allocates the state tensors of optimizers, for new runs and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tasks.runtime.optim.managed_memory import zeros as paged_zeros

REMAINDER = "remainder"
"""Name of the optimizer state that holds the low 16 bits of the master weights."""


def new_state_tensor(parameter: Tensor, shape: torch.Size, dtype: torch.dtype, *, paged: bool) -> Tensor:
    """Zeros of `shape` for the state of `parameter`, on its device; with `paged` in managed memory.

    A tensor with the parameter's rows, such as a moment or its scales, is sharded like the parameter. Any other tensor,
    such as a count, is replicated.
    """
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    # Managed memory is contiguous; `zeros_like` keeps the strides of the parameter.
    if shape == parameter.shape and not (paged and here.is_contiguous()):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    zeros: Callable[..., Tensor] = paged_zeros if paged else torch.zeros
    if not isinstance(parameter, DTensor) or shape[:1] != parameter.shape[:1]:
        return zeros(shape, dtype=dtype, device=here.device)
    # Rows of another length, such as scales, occur only with parameters that are sharded by rows.
    part = here.shape if shape == parameter.shape else (here.shape[0], *shape[1:])
    return DTensor.from_local(
        zeros(part, dtype=dtype, device=here.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
