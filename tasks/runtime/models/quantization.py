"""Frozen 4-bit weights under a LoRA adapter (QLoRA), with bitsandbytes.

Only the weights in memory are quantized: the model is read exactly, and its fingerprint and export use exact weights.
bitsandbytes quantizes a layer when it moves to its device. FSDP broadcasts exact weights one at a time, and each rank
keeps its shard of what `quantize_weight` returns. The scales, one byte for 64 weights, are replicated.
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
from strata_platform.spec.model import Lora
from strata_platform.spec.run_spec import Parallel
from tasks.runtime.models.build import compute_dtype
from tasks.runtime.models.lora import saved_modules

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

log = logging.getLogger(__name__)

# Weights that share a scale.
_BLOCK = 64
_KIND: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}


PackedLayers: TypeAlias = "dict[str, tuple[Linear4bit, Tensor]]"
"""The name of a quantized weight → its layer, and a meta tensor with shape and dtype of the exact weight."""


@contextmanager
def quantize_linear_layers(model: PreTrainedModel, spec: RunSpec) -> Iterator[None]:
    """Replace the linear layers of `model` with 4-bit layers, except its head and those that are trained whole.

    Add the adapter within the block.
    """
    if not spec.is_quantized:
        yield
        return
    assert isinstance(spec.adapter, Lora)
    exact = {model.get_output_embeddings(), *(module for _, module in saved_modules(model, spec.adapter))}
    dtype, storage = compute_dtype(spec.model, spec.parallel), _storage(spec.parallel)
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer in exact:
            continue
        if layer.weight.numel() % _BLOCK:
            log.warning(
                "adapter.quantization: %s is not quantized, because its size is not a multiple of %d", path, _BLOCK
            )
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _linear_4bit(layer, dtype, storage))
    model.is_loaded_in_4bit = True
    try:
        yield
    finally:
        # With this attribute transformers and accelerate assume that they have loaded and placed the model themselves.
        del model.is_loaded_in_4bit


def _storage(parallel: Parallel) -> torch.dtype:
    """The dtype in which FSDP and checkpoints see packed weights: uint8 where possible.

    In bfloat16 one packed value in a thousand is NaN. FSDP copies with `torch._foreach_copy_`, which on a GPU converts
    via float32 and may merge all NaNs. FSDP before PyTorch 2.15 does not accept uint8, and copies float32 bit for bit.
    """
    return torch.float32 if parallel.type == "fsdp" and torch.__version__ < "2.15" else torch.uint8


def _linear_4bit(layer: nn.Linear, dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> nn.Linear:
    """The same layer from bitsandbytes; its weight is quantized when it moves to a device."""
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
    """Give the quantized layers of a meta model weights with their packed shape, on the meta device."""
    from bitsandbytes.nn import Linear4bit

    found: PackedLayers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            exact = layer.weight.detach()
            size = exact.numel() // 2 // layer.quant_storage.itemsize
            empty = torch.empty(size, 1, dtype=layer.quant_storage, device="meta")
            layer.weight = nn.Parameter(empty, requires_grad=False)
            # bitsandbytes' own forward wraps the weight in a parameter class in every pass, which torch.compile
            # rejects.
            vars(layer)["forward"] = partial(_project, layer)
            found[f"{name}.weight"] = (layer, exact)
    return found


def quantize_weight(layer: Linear4bit, exact: Tensor) -> Tensor:
    """Quantize `exact` to 4 bits. Returns the packed weight; `layer` keeps the scales."""
    from bitsandbytes.functional import quantize_4bit

    packed: Tensor
    packed, layer.quant_state = quantize_4bit(exact, blocksize=_BLOCK, quant_storage=layer.quant_storage, **_KIND)
    return packed


def _project(layer: Linear4bit, x: Tensor) -> Tensor:
    """`layer(x)` with a plain tensor as the weight."""
    from bitsandbytes import matmul_4bit

    y: Tensor = matmul_4bit(x.to(layer.compute_dtype), layer.weight, bias=layer.bias, quant_state=layer.quant_state)
    return y.to(x.dtype)
