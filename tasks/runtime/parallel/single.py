"""One process: nothing is split."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import PreTrainedModel

from tasks.runtime.models.build import place
from tasks.runtime.parallel.base import InPlace
from tasks.runtime.process.ranks import Processes


class Single(InPlace):
    """The whole model in one process."""

    def __init__(self, processes: Processes) -> None:
        self._device = processes.device

    def wrap(self, model: PreTrainedModel, *, weights_follow: bool) -> nn.Module:
        """The model itself, on this process's device."""
        place(model, self._device)
        return model

    def backward_pass(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Nothing to average."""
        return nullcontext()
