"""Which attention implementation of transformers a model uses: the one that the spec names, or the best that it has."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from tasks.runtime.models.attention import attention_sinks
from tasks.runtime.models.media.multimodal import auto_class

VARLEN = "strata_varlen"
"""The name of varlen attention among transformers' implementations. No mask is made for it."""


def choose_attention(attention: str, config: PretrainedConfig) -> str:
    """transformers' name of the attention implementation for a value of `model.attention`.

    `auto` is `sdpa` where the model class supports it, as most do, and `eager` elsewhere: Gemma 2 caps scores, gpt-oss
    has attention sinks, and neither can be said to PyTorch's `scaled_dot_product_attention`. Training may then use
    varlen attention instead.
    """
    if attention != "auto":
        return attention
    return "sdpa" if _supports(config, "sdpa") else "eager"


def unsupported_attention(attention: str, config: PretrainedConfig) -> str | None:
    """Why a model of this configuration cannot use `model.attention`, with the way out; None if it can."""
    flash = attention.startswith("flash")
    if attention in ("auto", "eager") or (_computes(config, attention) if flash else _supports(config, attention)):
        return None
    others = "'eager'" if not _supports(config, "sdpa") else "'sdpa' or 'eager'"
    why = "does not support it"
    if flash and _supports(config, "flash_attn"):
        why += ", and transformers would load another kernel from the Hub"
    return f"model.attention {attention!r}: {_class_of(config).__name__} {why}; set model.attention to 'auto', {others}"


def missing_sdpa(attention: str, config: PretrainedConfig) -> str | None:
    """What `model.attention: auto` costs a model without sdpa, one sentence for the log; None if it has sdpa or no
    attention, or if another implementation is set.
    """
    has_attention = hasattr(config.get_text_config(), "num_attention_heads")
    if attention != "auto" or not has_attention or _supports(config, "sdpa"):
        return None
    name, costs = _class_of(config).__name__, "runs eager, which keeps the scores of all pairs of tokens in a row"
    if config.model_type in attention_sinks.MODEL_TYPES:
        return (
            f"{name} does not support sdpa; training in bfloat16 on a GPU uses varlen attention, anything else {costs}"
        )
    flash = "; with flash_attention_2 installed, set model.attention to it"
    known = _computes(config, "flash_attention_2")
    return f"{name} does not support sdpa, so attention {costs}{flash if known else ''}"


def _class_of(config: PretrainedConfig) -> Any:
    """The class that `auto_class` builds; None if there is none for this configuration."""
    return auto_class(config)._model_mapping.get(type(config), None)


def _computes(config: PretrainedConfig, flash: str) -> bool:
    """Whether the class has flash attention, and by this package: a model with attention sinks lists those that do."""
    known = (getattr(cls, "_compatible_flash_implementations", None) for cls in _classes_of(config))
    return _supports(config, "flash_attn") and all(names is None or flash in names for names in known)


def _classes_of(config: PretrainedConfig) -> set[Any]:
    """The class of the model, and that of its language model, such as Gemma 2's in PaliGemma."""
    return {_class_of(config), _class_of(config.get_text_config())} - {None}


def _supports(config: PretrainedConfig, implementation: str) -> bool:
    """Whether the classes say that they have `sdpa` or `flash_attn`. An unknown class answers when it is built."""
    # In transformers 5.17, Gemma 2 says that it has sdpa, which drops the cap of its scores.
    if implementation == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return False
    return all(bool(getattr(cls, f"_supports_{implementation}", False)) for cls in _classes_of(config))
