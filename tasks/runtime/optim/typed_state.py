"""Optimizers whose state has dtypes of its own."""

from __future__ import annotations

from typing import Any

import torch


class TypedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose `load_state_dict` keeps the dtypes of state tensors.

    PyTorch's casts them to the parameter's dtype: int16 remainders, fp32 moments of bfloat16 weights and 8-bit moments
    would be damaged. Accelerate loads an optimizer's own state into it when it prepares one for a Trainer.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state from the result of `state_dict()`."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update({parameters[number]: dict(state) for number, state in state_dict["state"].items()})
