"""Shapes of models from Hugging Face configurations: one row for each `model_type`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strata_platform.errors import Problem, SpecError
from strata_platform.estimate.shapes import KNOWN, ModelShape
from strata_platform.model_config import read_config_file


@dataclass(frozen=True)
class _Family:
    """How the layers of a family differ from Llama's.

    A bias is True, False, or the setting of the configuration that says whether the family has it.

    Attributes:
        norms, last_norm_bias, norm_bias: norms of hidden states in a layer; whether the last and those have biases.
        qkv_bias, output_bias, mlp_bias, head_bias: biases of linear layers.
        qk_norm: norms of queries and keys: of each head's values, or of all together.
        gated, packed: as in ModelShape.
        tied, head_dim: defaults of `tie_word_embeddings` and `head_dim`.
        experts: the setting with the number of experts; None for a dense family.
        expert_size: the setting with the columns of an expert.
        expert_bias: whether experts and router have biases.
        shared_size: the setting with the columns of an expert that all tokens use.
        sinks: whether each head has an attention sink.
    """

    norms: int = 2
    norm_bias: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    gated: bool = True
    packed: bool = False
    tied: bool = False
    head_dim: int | None = None
    experts: str | None = None
    expert_size: str = "intermediate_size"
    expert_bias: bool = False
    shared_size: str | None = None
    sinks: bool = False


_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_GEMMA: dict[str, Any] = {**_BIASES, "tied": True, "head_dim": 256}
FAMILIES: dict[str, _Family] = {
    "llama": _Family(**_BIASES, mlp_bias="mlp_bias"),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(**_BIASES, qk_norm="head"),
    "smollm3": _Family(**_BIASES, mlp_bias="mlp_bias", tied=True),
    "granite": _Family(**_BIASES, mlp_bias="mlp_bias"),
    "gemma": _Family(**_GEMMA),
    "gemma2": _Family(**_GEMMA, norms=4),
    "gemma3_text": _Family(**_GEMMA, norms=4, qk_norm="head"),
    "phi": _Family(
        norms=1, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True, gated=False
    ),
    "phi3": _Family(packed=True),
    "olmo2": _Family(**_BIASES, qk_norm="all"),
    "exaone4": _Family(qk_norm="head"),
    "cohere": _Family(**_BIASES, norms=1, tied=True),
    "stablelm": _Family(norm_bias=True, qkv_bias="use_qkv_bias"),
    "starcoder2": _Family(
        norm_bias=True, qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", gated=False, tied=True
    ),
    "mixtral": _Family(experts="num_local_experts"),
    "granitemoe": _Family(**_BIASES, experts="num_local_experts"),
    "olmoe": _Family(**_BIASES, qk_norm="all", experts="num_experts"),
    "qwen2_moe": _Family(
        qkv_bias="qkv_bias", experts="num_experts", expert_size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
    ),
    "qwen3_moe": _Family(**_BIASES, qk_norm="head", experts="num_experts", expert_size="moe_intermediate_size"),
    "gpt_oss": _Family(
        qkv_bias=True, output_bias=True, head_dim=64, experts="num_local_experts", expert_bias=True, sinks=True
    ),
}  # fmt: skip
# Biases that a configuration leaves out are there in these families, and nowhere else.
_BIAS_DEFAULTS = {"qkv_bias": True, "use_bias": True}
# Configurations of models for more than text, and the model_type of their language model.
_TEXT_PARTS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
# Parts of names of trained variants, which have the shape of the model that they were trained from.
_VARIANTS = ("2507", "instruct", "thinking", "base", "chat", "it")


def shape_of(name: str, config: Path | None = None) -> ModelShape:
    """The shape of `model.name`, a folder, a preset, or a Hub id of KNOWN; or of the given config.json.

    Raises SpecError if it is none of them, or another kind of model.
    """
    file = config or Path(name) / "config.json"
    if config is not None or file.exists():
        return _read(file)
    parts = name.rpartition("/")[2].lower().split("-")
    plain = "-".join(part for part in parts if part not in _VARIANTS)
    if plain in KNOWN:
        return KNOWN[plain]
    raise SpecError(
        [
            Problem(
                "model.name",
                "is neither a folder with a config.json nor a model whose shape is known; name the model's "
                "config.json with --config",
                given=repr(name),
                allowed=", ".join(KNOWN),
            )
        ],
        "estimate",
    )


def _read(file: Path) -> ModelShape:
    try:
        config = read_config_file(file)
    except ValueError as error:
        raise SpecError([Problem("model.name", str(error))], "estimate") from None
    try:
        return from_config(config)
    except (ValueError, KeyError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise SpecError([Problem("model.name", f"{file}: {reason}")], "estimate") from None


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        ValueError: another kind of model, or an invalid size.
        KeyError: a field is missing.
    """
    kind, unread = config["model_type"], None
    if kind in _TEXT_PARTS and isinstance(config.get("text_config"), Mapping):
        kind, unread = _TEXT_PARTS[kind], f"model_type {kind!r}: the parts for images, which are frozen or small"
        config = config["text_config"]
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported by the estimate; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    head_dim = config.get("head_dim") or family.head_dim
    if head_dim is None and hidden % heads:
        raise ValueError(f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim")
    head_dim = _size(config, "head_dim", family.head_dim or hidden // heads)
    kv_heads = _size(config, "num_key_value_heads", heads)
    columns = _columns(config, family)
    has = {
        name: _bias(config, value)
        for name in ("qkv_bias", "output_bias", "mlp_bias")
        for value in [getattr(family, name)]
    }
    vectors = family.norms * hidden * (1 + family.norm_bias) + hidden * has["output_bias"]
    vectors += has["mlp_bias"] * (columns["intermediate"] * (1 + family.gated) + hidden)
    vectors += {"": 0, "head": 2 * head_dim, "all": (heads + kv_heads) * head_dim}[family.qk_norm]
    vectors += heads * family.sinks
    if family.expert_bias:
        # Of the gate and the first projection, of the last one, and of the router.
        vectors += 2 * (columns["intermediate"] + columns["idle"]) + columns["experts"] * (hidden + 1)
    vocabulary = _size(config, "vocab_size")
    tied = config.get("tie_word_embeddings")
    return ModelShape(
        hidden=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=family.tied if tied is None else bool(tied),
        scores=False,
        biased=has["qkv_bias"],
        gated=family.gated,
        packed=family.packed,
        vectors=vectors,
        root_vectors=hidden * (1 + family.norm_bias) + vocabulary * family.head_bias,
        unread=unread,
        **columns,
    )


def _columns(config: Mapping[str, Any], family: _Family) -> dict[str, int]:
    """The fields of ModelShape that describe the MLP or the experts."""
    if family.experts is None:
        return {"intermediate": _size(config, "intermediate_size"), "experts": 0, "idle": 0}
    # transformers writes the first name, and the family's own configurations have the second.
    experts = _size(config, family.experts if family.experts in config else "num_local_experts")
    active, size = _size(config, "num_experts_per_tok"), _size(config, family.expert_size)
    if active > experts:
        raise ValueError(f"num_experts_per_tok {active} is more than the {experts} experts")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("some layers have experts and some an MLP, which the estimate does not know")
    shared = _size(config, family.shared_size) if family.shared_size else 0
    return {
        "intermediate": active * size + shared,
        "experts": experts,
        "active_experts": active,
        "idle": (experts - active) * size,
        "shared": shared,
    }


def _bias(config: Mapping[str, Any], setting: bool | str) -> bool:
    return bool(config.get(setting, _BIAS_DEFAULTS.get(setting, False))) if isinstance(setting, str) else setting


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The size in the field `name`; the default if it is null or missing."""
    value = config[name] if default is None else config.get(name, default)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {json.dumps(value)}, not a whole number of at least 1")
    return value
