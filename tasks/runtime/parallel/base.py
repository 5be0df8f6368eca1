"""What strategies share under which parameters have their gradients, whole or a part of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.runtime.optim.gradients import clip_gradients, skip_step


class BaseStrategy:
    """Any optimizer steps the parameters where they are."""

    def attach_optimizer(
        self, wrapped: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as they are."""
        return wrapped, optimizer

    def clip(self, wrapped: nn.Module, max_norm: float) -> Tensor:
        """At once."""
        return clip_gradients(wrapped, max_norm)

    def skip_step(self, optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
        """By the optimizer itself, or by taking its gradients away."""
        skip_step(optimizer, skip)
