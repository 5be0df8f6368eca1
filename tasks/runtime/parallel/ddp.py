"""DistributedDataParallel: one replica per rank; gradients are averaged during the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from strata_platform.spec.sections.parallel import Ddp as Settings
from tasks.runtime.models.build import move_to_device
from tasks.runtime.models.media.multimodal import beyond_text
from tasks.runtime.parallel.base import BaseStrategy
from tasks.runtime.process.ranks import Processes


class Ddp(BaseStrategy):
    """Replicates the model on every rank."""

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self._settings, self._device = settings, processes.device

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """Wrap the model in DistributedDataParallel, which broadcasts the weights of rank 0."""
        move_to_device(model, self._device)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            bucket_cap_mb=self._settings.bucket_cap_mb,
            # Gradients live in the reduction buckets, so there is no second copy of them.
            gradient_as_bucket_view=True,
            # Some vision towers have a last layer that nothing reads.
            find_unused_parameters=any(parameter.requires_grad for parameter in beyond_text(model)),
        )
        fix_bucket_order(wrapped)
        return wrapped

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Average the gradients once per step, in its last backward pass."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()

    def evaluation(self, wrapped: nn.Module) -> AbstractContextManager[nn.Module]:
        """Yield the replica: the wrapper would synchronize buffers, and skip that in the training pass that follows."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext(wrapped.module)


def fix_bucket_order(wrapped: DistributedDataParallel) -> None:
    """Fix the order of the gradient buckets before the first step, so that it is the same at every start.

    By default DistributedDataParallel reorders the buckets after the first backward pass, by the order in which
    gradients became ready. The place of a gradient in its bucket decides the order of the sum over ranks. A resumed run
    would therefore round its first step differently from an uninterrupted run.
    """
    model = wrapped.module
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = vars(model).get("forward")
    # Zero gradients arrive for the last parameters first, as in a real backward pass. On a GPU, DistributedDataParallel
    # needs an input tensor.
    model.forward = lambda zero: torch.stack([parameter.reshape(-1)[0].float() for parameter in trained]).sum() * zero
    zero = torch.zeros((), device=trained[0].device)
    try:
        # The first pass records the order. The buckets are rebuilt before the second one.
        for _ in range(2):
            wrapped(zero).backward()
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
    wrapped.zero_grad()
