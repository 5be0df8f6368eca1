"""Frozen weights in four bits under an adapter (QLoRA), by bitsandbytes.

Only what lies in memory is quantized: the model is read as it is, its fingerprint and what is exported are those of its
exact weights. bitsandbytes quantizes a layer when it moves to its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from strata_platform.spec.model import Lora


def is_quantized(spec: RunSpec) -> bool:
    """Whether the model's own weights are."""
    return isinstance(spec.adapter, Lora) and spec.adapter.quantization != "none"


@contextmanager
def quantized(model: PreTrainedModel, spec: RunSpec) -> Iterator[None]:
    """From now on the linear layers of `model`, its head aside, hold four bits of a weight; in the block PEFT knows."""
    if not is_quantized(spec):
        yield
        return
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _four_bits(layer))
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        # Where it stays, transformers and accelerate take the model for one that they have loaded and placed.
        del model.is_loaded_in_4bit


def _four_bits(layer: nn.Linear) -> nn.Linear:
    """The same layer, of bitsandbytes; its weight is packed when it moves to a device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    settings: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    packed: nn.Linear = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        device="meta",
        **settings,
    )
    packed.weight = Params4bit(layer.weight.data, requires_grad=False, module=packed, **settings)
    packed.bias = layer.bias
    return packed
