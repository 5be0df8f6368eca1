"""DistributedDataParallel: a replica in each process, gradients averaged while the backward pass runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.parallel import Ddp as Settings
from tasks.runtime.models.build import move_to_device
from tasks.runtime.parallel.base import BaseStrategy
from tasks.runtime.process.ranks import Processes


class Ddp(BaseStrategy):
    """A replica of the model in each process."""

    def __init__(self, spec: RunSpec, processes: Processes) -> None:
        assert isinstance(spec.parallel, Settings)
        self._settings, self._device = spec.parallel, processes.device

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """The model in DistributedDataParallel, which starts with the main process's weights."""
        move_to_device(model, self._device)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._settings.bucket_cap_mb,
            # Gradients live in the buckets that are reduced: no second copy of them.
            gradient_as_bucket_view=True,
        )
        fix_bucket_order(wrapped)
        return wrapped

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are averaged once for a step, in its last backward pass."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


def fix_bucket_order(wrapped: DistributedDataParallel) -> None:
    """Have the buckets of gradients ordered before the first step, the same at every start.

    DistributedDataParallel orders them anew after its first backward pass, in the order in which gradients were ready.
    A gradient's place in its bucket decides in which order the processes' shares of it are summed: a run that is
    continued would round its first step otherwise than it would have uninterrupted.
    """
    model = wrapped.module
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = vars(model).get("forward")
    # Gradients of zero, of the last parameters first, as those of a model come. On a GPU a pass must have an input.
    model.forward = lambda zero: torch.stack([parameter.reshape(-1)[0].float() for parameter in trained]).sum() * zero
    zero = torch.zeros((), device=trained[0].device)
    try:
        # The first pass sees the order, and before the second one buckets are made in it.
        for _ in range(2):
            wrapped(zero).backward()
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
    wrapped.zero_grad()
