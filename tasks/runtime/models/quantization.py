"""Frozen weights in four bits under an adapter (QLoRA), by bitsandbytes.

Only what lies in memory is quantized: the model is read as it is, its fingerprint and what is exported are those of its
exact weights. bitsandbytes quantizes a layer when it moves to its device. FSDP hands out exact weights, one at a time,
and each process keeps its part of what `pack` makes of one; the scales, a byte for 64 weights, are whole everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_platform.spec import RunSpec
from tasks.runtime.models.build import compute_dtype

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

log = logging.getLogger(__name__)

# Weights that share a scale, each with its own.
_BLOCK = 64
_KIND: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}


PackedLayers: TypeAlias = "dict[str, tuple[Linear4bit, Tensor]]"
"""By the name of a weight that is packed its layer, and an empty tensor like the exact weight."""


@contextmanager
def quantize_linear_layers(model: PreTrainedModel, spec: RunSpec) -> Iterator[None]:
    """From now on the linear layers of `model`, its head aside, hold four bits of a weight; in the block PEFT knows."""
    if not spec.is_quantized:
        yield
        return
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer is head:
            continue
        if layer.weight.numel() % _BLOCK:
            log.warning(
                "adapter.quantization: %s, whose weights are no whole blocks of %d, is not packed", path, _BLOCK
            )
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _linear_4bit(layer, compute_dtype(spec), _storage(spec)))
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        # Where it stays, transformers and accelerate take the model for one that they have loaded and placed.
        del model.is_loaded_in_4bit


def _storage(spec: RunSpec) -> torch.dtype:
    """What packed weights pose as: bytes, where numbers would be converted.

    As bfloat16 one in a thousand is NaN, and FSDP copies by `torch._foreach_copy_`, which on a GPU goes by way of
    float32 and, by its source, makes one NaN of them all. Earlier versions of FSDP take no bytes; float32 is copied as
    it is.
    """
    return torch.float32 if spec.parallel.type == "fsdp" and torch.__version__ < "2.15" else torch.uint8


def _linear_4bit(layer: nn.Linear, dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> nn.Linear:
    """The same layer, of bitsandbytes; its weight is packed when it moves to a device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    settings = {**_KIND, "quant_storage": storage}
    packed: nn.Linear = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        device="meta",
        **settings,
    )
    packed.weight = Params4bit(layer.weight.data, requires_grad=False, blocksize=_BLOCK, module=packed, **settings)
    packed.bias = layer.bias
    return packed


def set_packed_shapes(model: nn.Module) -> PackedLayers:
    """Give the quantized layers of an empty model weights of the shape that they have when packed, still empty."""
    from bitsandbytes.nn import Linear4bit

    found: PackedLayers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            exact = layer.weight.detach()
            size = exact.numel() // 2 // layer.quant_storage.itemsize
            empty = torch.empty(size, 1, dtype=layer.quant_storage, device="meta")
            layer.weight = nn.Parameter(empty, requires_grad=False)
            # bitsandbytes' own makes a parameter of its class of what it finds, in every pass, which no graph can have.
            vars(layer)["forward"] = partial(_project, layer)
            found[f"{name}.weight"] = (layer, exact)
    return found


def quantize_weight(layer: Linear4bit, exact: Tensor) -> Tensor:
    """The weight of `layer` in four bits; the layer keeps the scales."""
    from bitsandbytes.functional import quantize_4bit

    packed: Tensor
    packed, layer.quant_state = quantize_4bit(exact, blocksize=_BLOCK, quant_storage=layer.quant_storage, **_KIND)
    return packed


def _project(layer: Linear4bit, x: Tensor) -> Tensor:
    """`layer(x)`, of a weight that is a plain tensor."""
    from bitsandbytes import matmul_4bit

    y: Tensor = matmul_4bit(x.to(layer.compute_dtype), layer.weight, bias=layer.bias, quant_state=layer.quant_state)
    return y.to(x.dtype)
