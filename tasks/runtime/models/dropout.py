"""Dropout of models and adapters: turned off where a loss compares log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def dropout_rates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every rate above 0 in a module of `model`: the path of the module, the module, and its attribute."""
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield path, module, "p"
        for name, value in vars(module).items():
            # As `attention_dropout` of Llama and `dropout` of OPT.
            if "dropout" in name and isinstance(value, float) and value > 0:
                yield path, module, name


def turn_dropout_off(model: nn.Module) -> bool:
    """Turn dropout off in all modules, of layers and of functions that modules call with a rate of their own.

    The config keeps its rates, and so does an exported model. Returns whether there was any.
    """
    found = list(dropout_rates(model))
    for _, module, name in found:
        vars(module)[name] = 0.0
    return bool(found)
