"""Frozen 4-bit weights under a LoRA adapter (QLoRA), with bitsandbytes.

Only the weights in memory are quantized: the model is read exactly, and its fingerprint and export use exact weights.
bitsandbytes quantizes a layer when it moves to its device. FSDP broadcasts exact weights one at a time, and each rank
keeps its shard of what `quantize_weight` returns. The scales, one byte for 64 weights, are replicated.

The weights of experts are packed whole. The fused operator takes them as `restore_weight` gives them, dequantized while
a product needs them, in the forward pass and again in the backward pass.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from strata_kernels.patch.discover import plain_pytorch
from strata_kernels.patch.discover_experts import has_experts, prove_experts
from strata_kernels.patch.small_copy import NotEqual
from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.model import Lora
from tasks.runtime.models.adapters.adapted_layers import weights_read_by
from tasks.runtime.models.adapters.lora import saved_modules
from tasks.runtime.models.config import compute_dtype

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

log = logging.getLogger(__name__)

NF4_BLOCK = 64
"""Weights that share a scale."""

_KIND: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}


PackedLayers: TypeAlias = "dict[str, tuple[Linear4bit | _PackedWeight, Tensor]]"
"""The name of a quantized weight → where its scales are kept, and a meta tensor with shape and dtype of the exact
weight.
"""


@dataclass
class _PackedWeight:
    """A weight of experts [E, ...]; its scales, once there are some. Of one that moves to a device, bitsandbytes keeps
    them.
    """

    shape: torch.Size
    quant_storage: torch.dtype
    quant_state: Any = None


@dataclass
class _Restore:
    """The method `restore_weight` of experts."""

    experts: nn.Module
    dtype: torch.dtype
    weights: dict[str, _PackedWeight]

    @property
    def count(self) -> int:
        """How many experts there are."""
        return next(iter(self.weights.values())).shape[0]

    def keep_scales(self, begin: int, count: int) -> None:
        """Keep the scales of `count` experts from number `begin` on, exact ones, for a rank that has only these."""
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        for weight in self.weights.values():
            state = weight.quant_state
            exact = dequantize_blockwise(state.absmax, state.state2) + state.offset
            own = exact.view(state.shape[0], -1)[begin : begin + count].flatten()
            weight.quant_state = QuantState(
                own.float(),
                shape=torch.Size((count, *state.shape[1:])),
                **{name: getattr(state, name) for name in ("code", "blocksize", "quant_type", "dtype")},
            )

    def __call__(self, name: str) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        packed: Any = getattr(self.experts, name)
        if isinstance(packed, DTensor):
            # Under expert parallelism: of the experts that this rank has.
            packed = packed.to_local()
        if packed.is_meta or not getattr(packed, "bnb_quantized", True):
            # While kernels are planned, or before the model moves to its device.
            exact: Tensor = packed.data
            return exact.to(self.dtype)
        state = self.weights[name].quant_state or packed.quant_state
        restored: Tensor = dequantize_4bit(packed.data, quant_state=state)
        return restored.to(self.dtype)


@contextmanager
def quantize_linear_layers(model: PreTrainedModel, spec: RunSpec) -> Iterator[None]:
    """Replace the linear layers of `model` with 4-bit layers, and pack the weights of its experts; except the head and
    modules that are trained whole.

    Add the adapter within the block.
    """
    if not spec.is_quantized:
        yield
        return
    assert isinstance(spec.adapter, Lora)
    exact = {model.get_output_embeddings(), *(module for _, module in saved_modules(model, spec.adapter))}
    dtype, storage = compute_dtype(spec.model, spec.parallel), _storage(spec.parallel)
    read: Counter[str] = Counter()
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer in exact:
            continue
        if layer.weight.numel() % NF4_BLOCK:
            log.warning(
                "adapter.quantization: %s is not quantized, because its size is not a multiple of %d", path, NF4_BLOCK
            )
            continue
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        owner_class: Any = type(owner)
        if name in weights_read_by(owner_class):
            read[f"{name} of {owner_class.__name__}"] += 1
            continue
        setattr(owner, name, _linear_4bit(layer, dtype, storage))
    for layers, count in read.items():
        log.info("adapter.quantization: %s is not quantized in %d layers, whose code reads the weight", layers, count)
    if spec.packs_experts:
        _pack_experts(model, exact, dtype, storage)
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
    packed.weight = Params4bit(layer.weight.data, requires_grad=False, blocksize=NF4_BLOCK, module=packed, **settings)
    packed.bias = layer.bias
    return packed


def _pack_experts(model: PreTrainedModel, exact: set[Any], dtype: torch.dtype, storage: torch.dtype) -> None:
    """Have the weights of experts that the fused operator computes packed when they move to a device.

    `exact`: modules that are trained whole, and so what is in them.
    """
    from bitsandbytes.nn import Params4bit

    whole = {part for module in exact if module is not None for part in module.modules()}
    for path, module in model.named_modules():
        if not has_experts(module) or module in whole:
            continue
        weights = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
        reason = "its size is not a multiple of 64" if any(p.numel() % NF4_BLOCK for p in weights.values()) else None
        try:
            with plain_pytorch():
                prove_experts(module)
        except NotEqual as error:
            reason = str(error)
        if reason is not None:
            log.warning("adapter.quantization: %s is not quantized: %s", path, reason)
            continue
        scales = {name: _PackedWeight(weight.shape, storage) for name, weight in weights.items()}
        vars(module)["restore_weight"] = _Restore(module, dtype, scales)
        settings = {**_KIND, "quant_storage": storage}
        for name, weight in weights.items():
            packed = Params4bit(weight.data, requires_grad=False, blocksize=NF4_BLOCK, **settings)
            setattr(module, name, packed)


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
        restore = vars(layer).get("restore_weight")
        for own, weight in restore.weights.items() if restore is not None else ():
            exact = layer.get_parameter(own).detach()
            size = exact.numel() // 2 // weight.quant_storage.itemsize
            empty = torch.empty(size, 1, dtype=weight.quant_storage, device="meta")
            setattr(layer, own, nn.Parameter(empty, requires_grad=False))
            found[f"{name}.{own}"] = (weight, exact)
    return found


def quantize_weight(layer: Linear4bit | _PackedWeight, exact: Tensor) -> Tensor:
    """Quantize `exact` to 4 bits. Returns the packed weight; `layer` keeps the scales."""
    from bitsandbytes.functional import quantize_4bit

    packed: Tensor
    packed, layer.quant_state = quantize_4bit(exact, blocksize=NF4_BLOCK, quant_storage=layer.quant_storage, **_KIND)
    return packed


def _project(layer: Linear4bit, x: Tensor) -> Tensor:
    """`layer(x)` with a plain tensor as the weight."""
    from bitsandbytes import matmul_4bit

    y: Tensor = matmul_4bit(x.to(layer.compute_dtype), layer.weight, bias=layer.bias, quant_state=layer.quant_state)
    return y.to(x.dtype)
