"""What the strategies have in common whose parameters hold their own gradients, whole or sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.runtime.optim.gradients import clip_gradients, skip_step
from tasks.runtime.parallel.whole_model import WholeModel


class BaseStrategy:
    """Steps the model's parameters in place, with any optimizer."""

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return both unchanged."""
        return wrapped, optimizer

    def whole_model(self, model: PreTrainedModel) -> WholeModel:
        """The model itself: each rank has all of its weights."""
        return WholeModel(model)

    def evaluation(self, wrapped: nn.Module) -> AbstractContextManager[nn.Module]:
        """Yield the wrapped model: nothing of it changes in a forward pass without gradients."""
        return nullcontext(wrapped)

    def clip(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip immediately, or in the optimizer's kernel."""
        return clip_gradients(wrapped, max_norm, optimizer)

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """Skip it in the optimizer's kernel, or drop the gradients."""
        skip_step(optimizer, skip)
