"""Where an optimizer's state is: the one place that makes its tensors, those of a new run and those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tasks.runtime.optim.managed_memory import zeros as paged_zeros

REMAINDER = "remainder"
"""Name of the optimizer state that holds the low 16 bits of the master weights only."""


def new_slot(parameter: Tensor, shape: torch.Size, dtype: torch.dtype, *, paged: bool) -> Tensor:
    """Zeros of `shape` for the state of `parameter`, on its device; with `paged` in managed memory of its GPU.

    What has the parameter's rows, such as a moment or its scales, is split like it; what has not, as a count, is whole.
    """
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    # Pages are in one order; other memory is in that of the parameter.
    if shape == parameter.shape and not (paged and here.is_contiguous()):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    zeros: Callable[..., Tensor] = paged_zeros if paged else torch.zeros
    if not isinstance(parameter, DTensor) or shape[:1] != parameter.shape[:1]:
        return zeros(shape, dtype=dtype, device=here.device)
    # What has rows of another length is beside a parameter of which rows alone are split.
    part = here.shape if shape == parameter.shape else (here.shape[0], *shape[1:])
    return DTensor.from_local(
        zeros(part, dtype=dtype, device=here.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
