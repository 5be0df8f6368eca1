"""One process: no sharding and no communication."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import PreTrainedModel

from tasks.runtime.models.build import move_to_device
from tasks.runtime.parallel.base import BaseStrategy
from tasks.runtime.process.ranks import Processes


class Single(BaseStrategy):
    """Keeps the whole model on one device."""

    def __init__(self, processes: Processes) -> None:
        self._device = processes.device

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """Move the model to the device."""
        move_to_device(model, self._device)
        return model

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Do nothing: there is nothing to average."""
        return nullcontext()
