"""The model families that can be written as GGUF: one row for each `model_type` of transformers.

llama.cpp computes each of its architectures in one way. A row says how the family maps to it, and which settings of a
configuration it has no counterpart for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

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
        only: settings of the configuration with the one value that llama.cpp computes.
    """

    architecture: str
    rope_types: tuple[str, ...]
    interleaved_rope: bool = False
    whole_heads: bool = False
    only: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("llama", ("default", "linear", "yarn", "llama3"), interleaved_rope=True),
    "mistral": Family("llama", _SCALED, interleaved_rope=True),
    "qwen2": Family("qwen2", _SCALED, whole_heads=True),
    "qwen3": Family("qwen3", _SCALED, only={"attention_bias": False}),
}


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
    rope = config.rope_parameters
    if rope["rope_type"] not in family.rope_types:
        yield f"rope_type {rope['rope_type']!r}; it has {', '.join(family.rope_types)}"
    # Of yarn's settings only factor and original length have one meaning in both.
    for name in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if rope["rope_type"] == "yarn" and rope.get(name) is not None:
            yield f"{name} {rope[name]} in rope_parameters"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']}"
    for name, value in {"hidden_act": "silu", **family.only}.items():
        if getattr(config, name) != value:
            yield f"{name} {getattr(config, name)!r}"
    width = config.num_attention_heads * head_width(config)
    if family.whole_heads and width != config.hidden_size:
        yield f"heads of {width} values together and hidden_size {config.hidden_size}"


def head_width(config: PretrainedConfig) -> int:
    """Values of a head: `head_dim`, or its default."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def context_length(config: PretrainedConfig) -> int:
    """Tokens for which llama.cpp, which attends to all of them in these families, computes what transformers does."""
    positions: int = config.max_position_embeddings
    return min(positions, getattr(config, "sliding_window", None) or positions)
