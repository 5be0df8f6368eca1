"""One process: nothing is split."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import PreTrainedModel

from tasks.runtime.models.build import move_to_device
from tasks.runtime.parallel.base import BaseStrategy
from tasks.runtime.process.ranks import Processes


class Single(BaseStrategy):
    """The whole model in one process."""

    def __init__(self, processes: Processes) -> None:
        self._device = processes.device

    def wrap(self, model: PreTrainedModel, *, weights_loaded_later: bool) -> nn.Module:
        """The model itself, on this process's device."""
        move_to_device(model, self._device)
        return model

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Nothing to average."""
        return nullcontext()
