"""The configuration of the model of a spec: preset, sizes, dtypes and attention. Reads no weights."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from strata_platform.model_config import require_sizes
from strata_platform.spec.run_spec import Parallel
from strata_platform.spec.sections.model import Model
from tasks.runtime.data.preparation.tokenizer import read_tokenizer, with_added_tokens
from tasks.runtime.models.attention.attention_choice import choose_attention, missing_sdpa, unsupported_attention
from tasks.runtime.models.custom_code import register_custom_code
from tasks.runtime.models.pretrained import readable
from tasks.runtime.models.score_head import options_of

log = logging.getLogger(__name__)

# 4.2 million parameters: after a few minutes on two CPU cores it writes plausible docstrings.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        # Set to those of the tokenizer that is trained on the data; see `set_special_tokens`.
        "bos_token_id": None,
        "eos_token_id": None,
    },
}

# Families whose forward pass ends with an error in a version of transformers, whatever it is given.
BROKEN_IN = {"llama4": "5.24.0"}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_dtype(model: Model) -> torch.dtype:
    """The dtype of the weights. `auto` is bfloat16 on a GPU that computes in it, and float32 elsewhere."""
    if model.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return _DTYPES[model.dtype]


def compute_dtype(model: Model, parallel: Parallel) -> torch.dtype:
    """The dtype of forward and backward passes in training."""
    if parallel.type == "fsdp" and parallel.compute_dtype != "model":
        return _DTYPES[parallel.compute_dtype]
    return model_dtype(model)


def load_config(model: Model) -> PretrainedConfig:
    """The configuration of `model.name`; reads no weights.

    A process reads the same configuration once, and again if the file in a local folder changes. You get a copy.

    Raises:
        ValueError: the configuration cannot be read, or the installed version of transformers cannot run the family.
        Unreachable: the Hub does not answer.
    """
    if model.name in PRESETS:
        return LlamaConfig(**PRESETS[model.name], **options_of(model.head))
    register_custom_code(model)
    file = Path(model.name, "config.json")
    config = deepcopy(_read_config(model.name, model.revision, file.stat().st_mtime_ns if file.is_file() else None))
    for name, value in options_of(model.head).items():
        setattr(config, name, value)
    if model.from_scratch and hasattr(config, "quantization_config"):
        # It describes weights that are not read.
        del config.quantization_config
    if model.add_special_tokens:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, _vocabulary_size(model))
    return config


def new_tokens(model: Model) -> list[str]:
    """`model.add_special_tokens` without those of its own tokenizer that the model embeds, as after a first stage."""
    added = list(model.add_special_tokens)
    if not added or model.tokenizer:
        return added
    known = read_tokenizer(model.name, model.revision, field="model.name").get_vocab()
    embedded = load_config(model.model_copy(update={"add_special_tokens": ()})).get_text_config().vocab_size
    return [token for token in added if known.get(token, embedded) >= embedded]


@lru_cache(maxsize=8)
def _vocabulary_size(model: Model) -> int:
    """Tokens of the tokenizer, with `model.add_special_tokens`."""
    revision = None if model.tokenizer else model.revision
    field = "model.tokenizer" if model.tokenizer else "model.name"
    tokenizer = read_tokenizer(model.tokenizer or model.name, revision, field=field)
    return len(with_added_tokens(tokenizer, model.add_special_tokens))


@lru_cache(maxsize=8)
def _read_config(name: str, revision: str | None, modified: int | None) -> PretrainedConfig:
    """`modified` is the time in ns at which a local file was written; a newer file is another entry of the cache."""
    with readable(name):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        require_sizes(config.to_dict(), "config.json")
    if BROKEN_IN.get(config.model_type) == transformers.__version__:
        raise ValueError(
            f"model.name {name!r}: {config.model_type} does not run with transformers {transformers.__version__}: "
            "each of its forward passes fails; install another version"
        )
    return config


def attention_of(model: Model) -> str:
    """transformers' name of the attention implementation of `model.attention`. Raises as `load_config` does."""
    return choose_attention(model.attention, load_config(model))


def require_attention(model: Model) -> None:
    """Raises ValueError if the model's class does not support `model.attention`. Reads only its configuration."""
    config = load_config(model)
    if reason := unsupported_attention(model.attention, config):
        raise ValueError(reason)
    if cost := missing_sdpa(model.attention, config):
        log.warning("model.name %r: %s", model.name, cost)


def rope_sets(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The `rope_parameters` of a text configuration: one set for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def has_router_loss(model: Model) -> bool:
    """Whether the model is a mixture of experts whose configuration adds an auxiliary loss of its routers."""
    return bool(getattr(load_config(model).get_text_config(), "output_router_logits", False))
