"""Activation checkpointing, and compiling each layer of a model.

Both only replace the `forward` of a layer. Hooks on the layer, such as those with which FSDP2 gathers its weights, run
once and outside of it. Checkpointing happens inside the compiled function, so the compiler applies its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_offloading import Offloading
from tasks.runtime.models.activations.kept_operators import KeptOperators, draws_dropout, name_of
from tasks.runtime.models.media.multimodal import is_multimodal

# Operators that `per_op` saves because they take long: matrix products and attention. It recomputes all others.
_PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"),
    *("bitsandbytes::gemm_4bit", "strata::experts_up", "strata::experts_down"),
)
_ATTENTION = (
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_fused_attention_overrideable"),
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
    *("flex_attention", "torch_attn::_varlen_attn"),
    *("strata_runtime::flash_attention_4", "strata_runtime::varlen_attention_with_sinks"),
)
_SAVED = _PRODUCTS + _ATTENTION
# Inputs of a layer by the dimension that has another size in every batch; one graph serves all sizes.
_DYNAMIC = {"cu_seqlens": 1, "late_cu_seqlens": 1, "row_cu_seqlens": 1, "max_seqlen": 0}


def transformer_layers(model: nn.Module, field: str, instead: str) -> list[nn.Module]:
    """The model's transformer layers, found by the base class that transformers gives them.

    Raises:
        ValueError: no module has that base class. `field` of the spec needs the layers; the value `instead` does not.
    """
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{field} needs the model's layers, and {type(model).__name__} does not mark them; set {field} to {instead}"
        )
    return layers


def checkpoint_activations(model: nn.Module, training: Training) -> None:
    """Checkpoint the activations of the layers that `training.gradient_checkpointing` selects."""
    if not training.recomputed_every:
        return
    kind = training.gradient_checkpointing
    recomputed = _recomputed_layers(model, training)
    attentions = {layer: _attentions(layer) for layer in recomputed}
    if kind == "attention" and not any(attentions.values()):
        raise ValueError(
            f"training.gradient_checkpointing 'attention' keeps the results of attention, and {type(model).__name__} "
            "has no layer with a module of that name; set training.gradient_checkpointing to 'full'"
        )
    offloading = Offloading() if training.activation_offloading else None
    for layer in recomputed:
        # What the last one keeps stays where it is: the backward pass needs it next.
        copies = offloading if layer is not recomputed[-1] else None
        options: dict[str, Any] = {}
        if kind == "per_op" or (kind == "attention" and training.compile):
            options["context_fn"] = context = partial(_contexts, _per_op if kind == "per_op" else _attention)
            # The compiler's cache key needs a name for the policy; it does not cache graphs with an unnamed one.
            vars(context)["cache_hash"] = f"strata {kind} " + " ".join(_SAVED)
        elif kind == "attention":
            to_host = None if copies is None else copies.to_host
            options["context_fn"] = KeptOperators(frozenset(_SAVED), attentions[layer], to_host).contexts
        if training.compile:
            _set_forward(layer, partial(checkpoint, layer.forward, use_reentrant=False, **options))
            continue
        _set_forward(layer, _recomputing(layer.forward, options))
        if copies is not None:
            _set_forward(layer, copies.offload_input(layer.forward))


def _recomputed_layers(model: nn.Module, training: Training) -> list[nn.Module]:
    """The layers that `training` recomputes, whole or in part."""
    layers = transformer_layers(model, "training.gradient_checkpointing", "'none'")
    kept = training.gradient_checkpointing_except_last
    if kept >= len(layers):
        raise ValueError(
            f"training.gradient_checkpointing_except_last {kept} leaves none of the model's {len(layers)} layers to "
            "recompute; lower it, or set training.gradient_checkpointing to 'none'"
        )
    return layers[: len(layers) - kept][:: training.recomputed_every]


def compile_layers(model: nn.Module, training: Training) -> None:
    """Compile each layer with `torch.compile` if `training.compile` is true; equal layers share one graph."""
    if training.compile:
        # The precompiled header lies outside of the cache folder that runs keep. If all kernels are cached, it is the
        # only thing that would still need a C++ compiler.
        inductor.cpp_cache_precompile_headers = False
        # The sizes of a vision tower's inputs differ from batch to batch.
        decoder = model.get_decoder() if isinstance(model, PreTrainedModel) and is_multimodal(model.config) else model
        for layer in transformer_layers(decoder, "training.compile", "false"):
            _set_forward(layer, _full_graph(torch.compile(layer.forward, fullgraph=True, dynamic=False)))


def _recomputing(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            # Nothing is recomputed. A pass of generation writes to its cache, and is captured in a graph.
            return forward(*args, **kwargs)
        # A graph can neither read nor set the state of a random generator: runs that draw numbers in recomputed layers
        # have no graphs.
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=not captured, **options, **kwargs)

    return run


def _set_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.forward = forward


def _full_graph(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, with an error that says what to do if the layer is not one graph. Several graphs would only
    be slow.
    """

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, dimension in _DYNAMIC.items():
            if name in kwargs:
                torch._dynamo.maybe_mark_dynamic(kwargs[name], dimension)
        try:
            return compiled(*args, **kwargs)
        except Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"training.compile is true, but a layer of this model does not compile to one graph: {reason}. Set "
                "training.compile to false"
            ) from error

    return forward


def _contexts(policy: Callable[[], Callable[..., CheckpointPolicy]]) -> tuple[Any, Any]:
    """The contexts of a forward pass and of its recomputation."""
    both: tuple[Any, Any] = create_selective_checkpoint_contexts(policy())
    return both


def _per_op() -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = name_of(operator) in _SAVED and not draws_dropout(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _attention() -> Callable[..., CheckpointPolicy]:
    """For graphs, in which modules are no more: saves attention, the products before it, and the next one."""
    # By whether the pass recomputes: "before", "attention" or "after".
    passed = {False: "before", True: "before"}

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, again = name_of(operator), context.is_recompute
        saved = name in _SAVED and passed[again] != "after"
        if name in _ATTENTION:
            passed[again] = "attention"
        elif saved and passed[again] == "attention":
            passed[again] = "after"
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _attentions(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that attend, as transformers calls their classes, without those inside of another."""
    found: list[nn.Module] = []
    for child in layer.children():
        found += [child] if type(child).__name__.endswith("Attention") else _attentions(child)
    return found
