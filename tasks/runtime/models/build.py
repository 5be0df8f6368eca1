"""Build the model a spec names: a preset from scratch, or a pretrained one from the Hub or a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from strata_kernels import PatchReport, patch_model
from strata_platform.spec import RunSpec
from strata_platform.spec.kernels import Kernels
from strata_platform.spec.model import Model
from tasks.runtime.checkpoint.state import adopt_dtypes, model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import PreparedData
from tasks.runtime.models.activation_checkpointing import checkpoint_activations
from tasks.runtime.process.hub import asking_hub

log = logging.getLogger(__name__)

# 4.2 million parameters: a few minutes on two CPU cores suffice to write plausible docstrings.
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
        # Those of the tokenizer that is trained on the data; see `set_special_tokens`.
        "bos_token_id": None,
        "eos_token_id": None,
    },
}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_dtype(model: Model) -> torch.dtype:
    """The dtype of the weights. `auto` is bfloat16 on a GPU that computes in it, and float32 elsewhere."""
    if model.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return _DTYPES[model.dtype]


def compute_dtype(spec: RunSpec) -> torch.dtype:
    """The dtype that the forward and backward passes of training run in."""
    if spec.parallel.type == "fsdp" and spec.parallel.compute_dtype != "model":
        return _DTYPES[spec.parallel.compute_dtype]
    return model_dtype(spec.model)


def load_config(model: Model) -> PretrainedConfig:
    """The configuration of `model.name`; reads no weights.

    A process reads the same configuration once, and again if the file in a local folder changes. You get a copy.

    Raises:
        ValueError: the configuration cannot be read.
        Unreachable: the Hub does not answer.
    """
    if model.name in PRESETS:
        return LlamaConfig(**PRESETS[model.name])
    file = Path(model.name, "config.json")
    return deepcopy(_read_config(model.name, model.revision, file.stat().st_mtime_ns if file.is_file() else None))


@lru_cache(maxsize=8)
def _read_config(name: str, revision: str | None, modified: int | None) -> PretrainedConfig:
    """`modified` is the time in ns at which a local file was written; a newer file is another entry of the cache."""
    with _readable(name):
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)


def has_router_loss(spec: RunSpec) -> bool:
    """Whether the model adds a loss of its routers to that of tokens: a mixture of experts that is told to."""
    return bool(getattr(load_config(spec.model).get_text_config(), "output_router_logits", False))


def build_model(spec: RunSpec, *, weights: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model on the CPU, in `dtype`, by default the spec's.

    `weights`, a folder in Hugging Face format, replaces the spec's own start: the same architecture, later weights.
    A preset without weights is initialised from `seed`, the same on every machine. Raises ValueError for a model that
    cannot be read, and for an adapter, which transformers would take for its model with the adapter in it.
    """
    dtype = dtype or model_dtype(spec.model)
    source = weights or spec.model.name
    if source in PRESETS:
        torch.manual_seed(spec.seed)
        # Initialised in fp32 and then rounded, so that every dtype starts from the same weights. Weights alone: what is
        # computed, such as the frequencies of rotary embeddings, has the type that the model gives it in any dtype.
        model = AutoModelForCausalLM.from_config(load_config(spec.model), attn_implementation=spec.model.attention)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
    else:
        with _readable(source):
            model = AutoModelForCausalLM.from_pretrained(
                source,
                revision=None if weights else spec.model.revision,
                dtype=dtype,
                attn_implementation=spec.model.attention,
                use_safetensors=True,
                trust_remote_code=False,
            )
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"model.name {source!r} is an adapter, not a model; merge it into its model with PEFT's "
                "merge_and_unload, save that, and give its folder"
            )
        _freeze_as_made(model)
    model.config.use_cache = False  # no cache in training; generation asks for its own
    _drop_idle_settings(model.generation_config)
    return model


def _freeze_as_made(model: PreTrainedModel) -> None:
    """What its family does not have learn, such as biases that balance experts, transformers lets learn as it loads it.

    Processes without weights, and a run that continues, have it as it was made.
    """
    with init_empty_weights(include_buffers=False):
        made = type(model)(deepcopy(model.config))
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Name the model where it cannot be read; what the libraries say of it are their own words."""
    try:
        with asking_hub(f"model.name {source!r}"):
            yield
    # ImportError: of a package that the weights need, such as those that are quantized.
    except (OSError, ImportError, ValueError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"model.name {source!r} cannot be read: {said}; give the name of a model on the Hub, or a folder with its "
            "config.json and weights as safetensors"
        ) from error


def _drop_idle_settings(config: GenerationConfig) -> None:
    """Leave out settings without effect, such as how to sample where nothing is sampled, and padding by no token.

    transformers loads such settings, and does not save them beside one that was changed.
    """
    idle: tuple[str, ...] = ()
    if not config.do_sample:
        idle += ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
    if config.num_beams in (None, 1):
        idle += ("early_stopping", "length_penalty")
    if config.use_cache is False:
        idle += ("cache_implementation", "cache_config")
    if not config.return_dict_in_generate:
        idle += ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
    if config.pad_token_id is not None and config.pad_token_id < 0:
        idle += ("pad_token_id",)
    for name in idle:
        setattr(config, name, None)


def build_model_on_meta(spec: RunSpec, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of `build_model` without memory for its weights, which come from elsewhere; buffers are on the CPU."""
    return _model_on_meta(load_config(spec.model), dtype or model_dtype(spec.model), spec.model.attention)


def build_saved_model(folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    """The model of a checkpoint, likewise without memory for its weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = _model_on_meta(config, config.dtype, attention)
    index = Index(folder)
    set_dtypes(model, {name: index.dtype(name) for name in index})
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def saved_dtype(folder: Path) -> torch.dtype:
    """The dtype of the model of a checkpoint."""
    dtype: torch.dtype = AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
    return dtype


def _model_on_meta(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.config.use_cache = False
    model.tie_weights()
    return model


def is_on_meta(model: PreTrainedModel) -> bool:
    """Whether the model has no memory for its weights yet."""
    return next(model.parameters()).is_meta


def move_to_meta(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of `model_tensors`, of a model that is then empty; {} of one that is so already."""
    if is_on_meta(model):
        return {}
    taken = model_tensors(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
    model.tie_weights()
    return taken


def materialize(model: PreTrainedModel, device: torch.device, *, buffers_on: torch.device | None = None) -> None:
    """Give an empty model memory on `device` for weights that are read next; its buffers keep their values."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    for path, buffer in buffers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, buffer.to(buffers_on or device))
    model.tie_weights()


def move_to_device(model: PreTrainedModel, device: torch.device) -> None:
    """Move the model to `device`; one that is empty gets its memory there."""
    if is_on_meta(model):
        materialize(model, device)
    else:
        model.to(device)


def require_embeddings(spec: RunSpec, data: PreparedData) -> None:
    """Raises ValueError when the model has no embedding for a token that it may come to read. Reads no weights.

    A model's own tokenizer may have more than it embeds, as Gemma 3's has one for images: tokens that no plain text
    becomes, and that the data must not have.
    """
    tokenizer, name = data.tokenizer(), spec.model.name
    # Of a model that sees as well, that of its text.
    embedded = load_config(spec.model).get_text_config().vocab_size
    others = {number: token for token, number in tokenizer.get_vocab().items() if number >= embedded}
    if others.keys() - tokenizer.added_tokens_decoder.keys():
        raise ValueError(
            f"model.tokenizer has {len(tokenizer)} tokens but model.name {name!r} embeds {embedded}; use the model's "
            "own tokenizer"
        )
    largest = data.manifest.largest_token_id
    if largest in others:
        raise ValueError(
            f"data.source: its rows have the token {others[largest]!r}, number {largest}, but model.name {name!r} "
            f"embeds {embedded}; leave it out of the texts, or, where it pads or ends them, name another in the "
            "tokenizer's tokenizer_config.json"
        )
    if others:
        shown = ", ".join(map(repr, list(others.values())[:3])) + (", …" if len(others) > 3 else "")
        log.warning("model.name %r has no embedding for %s of the tokenizer, which no row has", name, shown)


def set_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a model from scratch the special tokens of the tokenizer trained for it; a pretrained one has its own."""
    # Of a model that sees as well, those of its text; the whole one's configuration need not have any.
    for config in (model.config.get_text_config(), model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(tokenizer, name))


def freeze_non_text_parameters(model: PreTrainedModel) -> None:
    """Let learn of a model that sees or hears as well only what texts come to.

    Others never have a gradient: `ddp` would wait for it, and where gradients lie in flat memory they would decay.
    """
    if model.config.get_text_config() is model.config:
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    beyond = [parameter for parameter in model.parameters() if id(parameter) not in reached]
    for parameter in beyond:
        parameter.requires_grad_(False)
    total = sum(parameter.numel() for parameter in beyond)
    log.info("model: %.1f M of its parameters are for other input than texts, and do not learn", total / 1e6)


def build_planning_model(spec: RunSpec) -> PreTrainedModel:
    """The same modules without memory: for planning what a run will compile."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            # Attention is not the kernel layer's, and this one runs on meta tensors.
            load_config(spec.model),
            attn_implementation="sdpa",
            dtype=compute_dtype(spec),
        )
    model.config.use_cache = False
    return model


def prepare_for_training(model: PreTrainedModel, spec: RunSpec) -> PatchReport | None:
    """Patch the model, and set what it recomputes in the backward pass."""
    report = patch(model, spec.kernels)
    checkpoint_activations(model, spec.training)
    return report


def has_fused_loss(report: PatchReport | None) -> bool:
    """Whether a model that was patched with this report computes its loss without logits."""
    return report is not None and "linear_cross_entropy" in report.counts


def patch(model: PreTrainedModel, kernels: Kernels) -> PatchReport | None:
    """Replace the model's operators by those of the kernel layer; None if `kernels.enabled` is false.

    Raises:
        ValueError: the model is of an unknown family, or an operator in `kernels.exclude` is unknown.
    """
    if not kernels.enabled:
        return None
    try:
        return patch_model(model, exclude=kernels.exclude)
    except ValueError as error:
        raise ValueError(
            f"kernels: {error}. In a spec, kernels.exclude leaves out operators, and kernels.enabled false all of them"
        ) from error
