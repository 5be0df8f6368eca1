"""Dropout of models and adapters: turned off where a loss compares log-probabilities."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def turn_dropout_off(model: nn.Module) -> bool:
    """Turn dropout off in all modules, of layers and of functions that modules call with a rate of their own.

    The config keeps its rates, and so does an exported model. Returns whether there was any.
    """
    found = False
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            found |= module.p > 0
            module.p = 0.0
        for name, value in vars(module).items():
            # As `attention_dropout` of Llama and `dropout` of OPT.
            if "dropout" in name and isinstance(value, float) and value > 0:
                found = True
                vars(module)[name] = 0.0
    return found
