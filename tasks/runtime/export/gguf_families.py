"""The model families that can be written as GGUF: one row for each `model_type` of transformers.

llama.cpp computes each of its architectures in one way. A row says how the family maps to it, and which settings of a
configuration it has no counterpart for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from tasks.runtime.models.layer_configs import head_width

_SCALED = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Family:
    """How the models of a family are written.

    Attributes:
        architecture: llama.cpp's name, as in gguf's `MODEL_ARCH_NAMES`.
        rope_types: values of `rope_parameters["rope_type"]` that llama.cpp computes.
        interleaved_rope: whether llama.cpp rotates neighbouring values of a head, instead of its two halves. The rows
            of the query and key projections are reordered for it.
        whole_heads: whether the heads' width together is the hidden size.
        window_pattern: one of so many layers attends to all tokens, the others to a window; 0: there is no window.
        norm_offset: whether norms multiply by 1 + weight, which llama.cpp stores.
        hyperparameters: further methods of GGUFWriter, and the setting of the configuration that each writes.
        only: settings of the configuration with the one value that llama.cpp computes.
    """

    architecture: str
    rope_types: tuple[str, ...]
    interleaved_rope: bool = False
    whole_heads: bool = False
    window_pattern: int = 0
    norm_offset: bool = False
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)


_SILU = {"hidden_act": "silu"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True}
_NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_WINDOW = {"add_sliding_window": "sliding_window"}
_CAPS = {
    "add_attn_logit_softcapping": "attn_logit_softcapping",
    "add_final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {
    "add_expert_count": "num_experts",
    "add_expert_used_count": "num_experts_per_tok",
    "add_expert_feed_forward_length": "moe_intermediate_size",
}
# Router weights sum to 1, and each layer has experts.
_QWEN_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES = {
    "llama": Family("llama", ("default", "linear", "yarn", "llama3"), interleaved_rope=True, only=_SILU),
    "mistral": Family("llama", _SCALED, interleaved_rope=True, only=_SILU),
    "qwen2": Family("qwen2", _SCALED, whole_heads=True, only=_SILU),
    "qwen3": Family("qwen3", _SCALED, only={"attention_bias": False, **_SILU}),
    "qwen3_moe": Family(
        "qwen3moe", _SCALED, hyperparameters=_EXPERTS, only={"attention_bias": False, **_QWEN_EXPERTS, **_SILU}
    ),
    # llama.cpp selects the factors of longrope by the size of its context, transformers by the length of the text.
    "phi3": Family("phi3", ("default",), whole_heads=True, only=_SILU),
    "gemma2": Family(
        "gemma2", ("default",), window_pattern=2, norm_offset=True, hyperparameters=_WINDOW | _CAPS, only=_GEMMA
    ),
    "gemma3_text": Family(
        "gemma3",
        ("default", "linear"),
        window_pattern=6,
        norm_offset=True,
        hyperparameters=_WINDOW,
        only={"use_bidirectional_attention": False, **_NO_CAPS, **_GEMMA},
    ),
}

# Families in which rotary embeddings may cover a part of each head.
_PARTIAL = ("phi3",)
# The layers of Gemma's models of 27 billion parameters, which llama.cpp tells by it.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
# The rotary embedding of layers with a window, which has no field that all versions of llama.cpp read.
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def family_of(config: PretrainedConfig) -> Family:
    """The row of a configuration.

    Raises ValueError if its family has none, or if llama.cpp computes a setting in another way.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type {config.model_type!r} is not one of the families that can be written as GGUF: "
            f"{', '.join(FAMILIES)}"
        )
    if problem := next(_differences(config, family), None):
        raise ValueError(f"llama.cpp has no {config.model_type} with {problem}")
    return family


def _differences(config: PretrainedConfig, family: Family) -> Iterator[str]:
    """Settings of the configuration that llama.cpp's architecture has no counterpart for."""
    rope = rope_of(config)
    if rope["rope_type"] not in family.rope_types:
        yield f"rope_type {rope['rope_type']!r}; it has {', '.join(family.rope_types)}"
    # Of yarn's settings only factor and original length have one meaning in both.
    for name in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if rope["rope_type"] == "yarn" and rope.get(name) is not None:
            yield f"{name} {rope[name]} in rope_parameters"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and config.model_type not in _PARTIAL:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']}"
    for name, value in family.only.items():
        if getattr(config, name, value) != value:
            yield f"{name} {getattr(config, name)!r}"
    for name in family.hyperparameters.values():
        if getattr(config, name) is None:
            yield f"{name} None"
    yield from _windows(config, family)
    width = config.num_attention_heads * head_width(config)
    if family.whole_heads and width != config.hidden_size:
        yield f"heads of {width} values together and hidden_size {config.hidden_size}"


def _windows(config: PretrainedConfig, family: Family) -> Iterator[str]:
    """Settings of Gemma's layers, with a window and without, that llama.cpp derives from others."""
    if not family.window_pattern:
        return
    every = family.window_pattern
    kinds = [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
        for layer in range(config.num_hidden_layers)
    ]
    if config.layer_types != kinds:
        yield f"layer_types other than full_attention in one of {every} layers"
    local = config.rope_parameters.get("sliding_attention", _LOCAL_ROPE)
    if {name: local.get(name) for name in _LOCAL_ROPE} != _LOCAL_ROPE:
        yield f"{local} as rope_parameters of its windows"
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]
    scale = config.hidden_size // config.num_attention_heads if is_27b else head_width(config)
    if config.query_pre_attn_scalar != scale:
        yield f"query_pre_attn_scalar {config.query_pre_attn_scalar}, where it computes with {scale}"


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary embedding of layers that attend to all tokens."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def context_length(config: PretrainedConfig, family: Family) -> int:
    """Tokens for which llama.cpp, which has no window in most of these families, computes what transformers does."""
    positions: int = config.max_position_embeddings
    if family.window_pattern:
        return positions
    return min(positions, getattr(config, "sliding_window", None) or positions)
