"""The weights of a model in training as its files on disk have them, for engines that read those."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


@torch.no_grad()
def checkpoint_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Names and weights in `dtype`, as `model.save_pretrained` writes them after `merge_and_unload`, layer by layer.

    model: with whole weights on each rank. An adapter is added to copies of its layers' weights, of one layer at a
    time; what is in `dtype` and has the form of the files is not copied.

    Raises:
        ValueError: the adapter makes weights differ that the files have once.
    """
    _require_one_embedding(model)
    for _, layer in groupby(_merged(model), key=lambda item: _layer(item[0])):
        for name, weight in revert_weight_conversion(model, dict(layer)).items():
            yield name, weight.to(dtype) if weight.is_floating_point() else weight


def _merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names without an adapter, which is added to them."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        path, based, own = name.rpartition(".base_layer.")
        if not based:
            yield name, parameter
        elif own == "weight":
            # Summed in fp32 and rounded once, as in the model that is exported.
            delta: Tensor = _with_adapter_in_fp32(modules[path]).get_delta_weight("default")
            yield f"{path}.{own}", (parameter.float() + delta).to(parameter.dtype)
        else:
            yield f"{path}.{own}", parameter


def _with_adapter_in_fp32(layer: Any) -> Any:
    """PEFT's layer with a copy of its adapter; its base layer is the same."""
    twin = copy(layer)
    twin._modules = {
        name: deepcopy(module).float() if name.startswith("lora_") else module
        for name, module in layer._modules.items()
    }
    return twin


def _layer(name: str) -> str:
    """The part of a name up to the number of its layer."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def _require_one_embedding(model: PreTrainedModel) -> None:
    ends: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if model.config.get_text_config().tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise ValueError(
            "adapter.target_modules: the model's embedding and head share a weight, and an adapter on one of them "
            "makes them differ, which a model's files do not know; leave both out of adapter.target_modules, or set "
            "objective.generation.engine to 'embedded', without a server"
        )
