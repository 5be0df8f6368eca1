"""What strategies share under which parameters have their gradients, whole or a part of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.runtime.optimizer import clip_gradients


class InPlace:
    """Any optimizer steps the parameters where they are."""

    def drive(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as they are."""
        return wrapped, optimizer

    def clip(self, wrapped: nn.Module, max_norm: float) -> Tensor:
        """At once."""
        return clip_gradients(wrapped, max_norm)
