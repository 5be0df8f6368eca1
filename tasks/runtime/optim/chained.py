"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each for parameters of its own, as one: with one list of groups, and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self.paged = any(getattr(part, "paged", False) for part in parts)
        groups = [{**group, "part": number} for number, part in enumerate(parts) for group in part.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of every one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, part in enumerate(self._parts):
            # Groups and state are replaced by whoever loads them, or has the step of one parameter taken.
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; each tensor keeps its type, where PyTorch's would give it the weights'."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update({parameters[number]: dict(slots) for number, slots in state_dict["state"].items()})
