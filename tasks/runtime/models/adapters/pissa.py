"""PiSSA: an adapter that begins as the principal part of each weight.

    W = R + s B A,  with B A from the largest singular values of W / s

The adapter learns from these A and B, and the frozen weight is the rest R, so the model begins as it was. R is no file:
each start computes it from W and the initial A and B, which every checkpoint keeps. Another decomposition, of another
machine, could have other signs and bits.

Source: Meng et al. (arXiv:2404.02948), with PEFT's decomposition (`init_lora_weights="pissa"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strata_platform.spec.sections.model import Lora
from tasks.runtime.checkpoint.storage import Index

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

INITIAL = "initial."
"""Prefix in checkpoints of the names of initial matrices."""

InitialMatrices: TypeAlias = "dict[str, Tensor]"
"""The name of an adapter's parameter → its values before the first step."""


def principal_matrices(model: PreTrainedModel, settings: Lora, seed: int, device: torch.device) -> InitialMatrices:
    """The initial matrices of an adapter, in its dtype, on the CPU; {} unless `init_lora_weights` asks for PiSSA.

    `model` has an adapter and stays as it is. Weights are decomposed one at a time, in fp32, on `device`. Adapters of
    embeddings have none.

    Raises:
        ValueError: a weight has fewer singular values than `adapter.r`.
    """
    if not settings.is_pissa:
        return {}
    torch.manual_seed(seed)
    found = {}
    for path, layer in _adapted_layers(model):
        exact = layer.weight.data
        if min(exact.shape) < settings.r:
            raise ValueError(
                f"adapter.r is {settings.r}, but {path} has {min(exact.shape)} singular values; lower adapter.r, leave "
                "the layer out of adapter.target_modules, or set adapter.init_lora_weights to 'default'"
            )
        matrices = {name: getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B")}
        before = {name: matrix.data for name, matrix in matrices.items()}
        layer.weight.data = exact.to(device)
        # Also writes R to the layer, from matrices that are not rounded yet.
        layer.pissa_init("default", settings.init_lora_weights)
        layer.weight.data = exact
        for name, matrix in matrices.items():
            found[f"{path}.{name}.default.weight"] = matrix.data.to("cpu", before[name].dtype).contiguous()
            matrix.data = before[name]
    return found


def read_initial_matrices(index: Index) -> InitialMatrices:
    """The initial matrices that a checkpoint keeps; {} if its adapter is no PiSSA."""
    tensors = {key: index.empty(key) for key in index if key.startswith(INITIAL)}
    index.read(tensors)
    return {key.removeprefix(INITIAL): tensor for key, tensor in tensors.items()}


def set_initial_matrices(model: PreTrainedModel, initial: Mapping[str, Tensor]) -> None:
    """Set the adapter of `model`, which is on the CPU and exact, to `initial`, and subtract it from frozen weights.

    Without `initial`, and on the meta device, nothing changes.
    """
    if not initial or next(model.parameters()).is_meta:
        return
    for path, layer in _adapted_layers(model):
        down, up = (layer.get_parameter(f"{name}.default.weight") for name in ("lora_A", "lora_B"))
        down.data.copy_(initial[f"{path}.lora_A.default.weight"])
        up.data.copy_(initial[f"{path}.lora_B.default.weight"])
        exact = layer.weight.data
        product = layer.scaling["default"] * up.data.float() @ down.data.float()
        product = product.T if layer.fan_in_fan_out else product
        layer.weight.data = (exact.float() - product).to(exact.dtype)


def _adapted_layers(model: PreTrainedModel) -> Iterator[tuple[str, LoraLayer]]:
    from peft.tuners.lora import LoraLayer

    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
            yield path, layer
