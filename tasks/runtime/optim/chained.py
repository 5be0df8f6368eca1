"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tasks.runtime.optim.typed_state import TypedStateOptimizer


class ChainedOptimizer(TypedStateOptimizer):
    """Several optimizers over disjoint parameters, with one list of groups and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self.paged = any(getattr(part, "paged", False) for part in parts)
        self.keeps_remainder = any(getattr(part, "keeps_remainder", False) for part in parts)
        groups = [{**group, "part": number} for number, part in enumerate(parts) for group in part.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, part in enumerate(self._parts):
            # Loading a checkpoint and stepping in the backward pass replace the groups and the state.
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            if not part.param_groups:
                # A step in the backward pass, of a parameter of another part.
                continue
            part.state = self.state
            part.step()
        return loss
