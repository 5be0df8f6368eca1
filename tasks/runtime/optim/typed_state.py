"""Optimizers whose state has other dtypes than the parameters."""

from __future__ import annotations

from typing import Any

import torch


class TypedStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose `load_state_dict` keeps the dtypes of state tensors.

    PyTorch casts them to the parameter's dtype, which damages int16 remainders, fp32 moments of bfloat16 weights and
    8-bit moments. Accelerate loads an optimizer's own state when it prepares the optimizer for a Trainer.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state from the result of `state_dict()`."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update({parameters[number]: dict(state) for number, state in state_dict["state"].items()})
