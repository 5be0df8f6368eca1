"""The layers of a model: what they recompute in the backward pass, and compiling them.

Both replace the `forward` of a layer, nothing else: hooks, such as those by which FSDP2 gathers its weights, run once
and outside of it. Recomputation is inside of what is compiled, so that the compiler decides with its policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from strata_platform.spec.training import Training

# What takes long: matrix products and attention, by all their implementations. Everything else is recomputed.
_KEPT = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"),
    "bitsandbytes::gemm_4bit",
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_fused_attention_overrideable"),
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
    *("flex_attention", "torch_attn::_varlen_attn"),
)
# Of what layers are given, the dimension whose size is another in every batch; graphs are made for all sizes.
_VARYING = {"cu_seqlens": 1, "late_cu_seqlens": 1, "max_seqlen": 0}


def transformer_layers(model: nn.Module, field: str, instead: str) -> list[nn.Module]:
    """The layers that the model is made of, by what transformers derives them from.

    Raises ValueError when the model does not say which they are: `field` needs them, at `instead` it does not.
    """
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{field} goes by a model's layers, and {type(model).__name__} does not say which they are; "
            f"set {field} to {instead}"
        )
    return layers


def checkpoint_activations(model: nn.Module, training: Training) -> None:
    """Let the layers that `training.gradient_checkpointing` wants compute activations again in the backward pass."""
    if not training.recomputed_every:
        return
    context = partial(create_selective_checkpoint_contexts, _keep_products)
    # By which the compiler's cache knows the policy; without one it keeps nothing of graphs that have it.
    vars(context)["cache_hash"] = "strata " + " ".join(_KEPT)
    options = {"context_fn": context} if training.gradient_checkpointing == "per_op" else {}
    layers = transformer_layers(model, "training.gradient_checkpointing", "'none'")
    for layer in layers[:: training.recomputed_every]:
        _set_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **options))


def compile_layers(model: nn.Module, training: Training) -> None:
    """Let `torch.compile` make a graph of each layer, when `training.compile` wants it; equal layers share one."""
    if training.compile:
        # A header that is compiled once serves many kernels, but lies outside of the folder that is kept: where all
        # kernels are found, nothing else would need the C++ compiler.
        inductor.cpp_cache_precompile_headers = False
        for layer in transformer_layers(model, "training.compile", "false"):
            _set_forward(layer, _whole(torch.compile(layer.forward, fullgraph=True, dynamic=False)))


def _set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.forward = forward


def _whole(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, saying what to do about a layer that is not one graph; in parts it would be slow, and nobody told."""

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, dimension in _VARYING.items():
            if name in kwargs:
                torch._dynamo.maybe_mark_dynamic(kwargs[name], dimension)
        try:
            return compiled(*args, **kwargs)
        except Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"training.compile is true, but layers of this model do not make one graph each: {reason}. "
                "Set training.compile to false"
            ) from error

    return forward


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Operators of higher order, which have no schema, have a plain name.
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else operator.__name__
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
