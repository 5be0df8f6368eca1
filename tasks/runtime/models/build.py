"""Build the model of a spec: with random weights, or a pretrained model from the Hub or a folder."""

from __future__ import annotations

import inspect
import logging
import re
from copy import deepcopy
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from strata_kernels import PatchReport, patch_model
from strata_kernels.patch.structure import unwrap
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import Model
from tasks.runtime.checkpoint.state import model_tensors, set_dtypes
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import PreparedData
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.attention.recurrent_layers import isolate_sequences
from tasks.runtime.models.attention.sequence_masks import mask_sequences
from tasks.runtime.models.config import attention_of, load_config, model_dtype
from tasks.runtime.models.media.cross_attention import attend_to_own_images
from tasks.runtime.models.media.image_masks import mask_images
from tasks.runtime.models.media.multimodal import beyond_text
from tasks.runtime.models.pretrained import advising_random_weights, load_pretrained
from tasks.runtime.models.score_head import class_of, head_of, scores
from tasks.runtime.models.shared_loss import share_loss
from tasks.runtime.optim.parameter_names import names_of, select

log = logging.getLogger(__name__)


def _resize_embeddings(model: PreTrainedModel, size: int, seed: int) -> None:
    """Add rows to embeddings and head, close to the mean of the others. Equal in every process and attempt."""
    there = model.config.get_text_config().vocab_size
    if size <= there:
        log.info("model.add_special_tokens: the model embeds %d tokens already; no row is added", there)
        return
    torch.manual_seed(seed)
    model.resize_token_embeddings(size, mean_resizing=True)
    log.info("model.add_special_tokens: %d rows added to the embeddings, %d in all", size - there, size)


def build_model(
    settings: Model, seed: int, *, weights: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model on the CPU.

    Args:
        settings: the spec's `model`.
        seed: the spec's `seed`. Random weights are drawn from it, the same on every machine.
        weights: a folder in Hugging Face format, whose weights replace those of `model.name`.
        dtype: of the weights; by default that of the spec.

    Raises:
        ValueError: the model cannot be read, is an adapter, or lacks or adds tensors; see `load_pretrained`.
        Unreachable: the Hub does not answer.
    """
    dtype = dtype or model_dtype(settings)
    if settings.from_scratch and not weights:
        model = _random_model(settings, seed, dtype)
    else:
        source, revision = (weights, None) if weights else (settings.name, settings.revision)
        with advising_random_weights(source, revision):
            model = load_pretrained(
                source,
                head=settings.head,
                seed=seed,
                revision=revision,
                dtype=dtype,
                attn_implementation=attention_of(settings),
            )
        _freeze_as_the_class_does(model)
        if settings.add_special_tokens and not weights:
            _resize_embeddings(model, load_config(settings).get_text_config().vocab_size, seed)
    use_no_cache(model)
    if model.can_generate():
        _reset_unused_settings(model.generation_config)
    # A checkpoint's configuration names the class.
    model.config.architectures = [type(model).__name__]
    share_loss(model)
    support_packed_rows(model)
    return model


def _random_model(settings: Model, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `from_config`, which initializes every weight as its family does; some stay in fp32."""
    config = load_config(settings)
    torch.manual_seed(seed)
    # Initialize in fp32 and round, so that every dtype starts from the same weights.
    model: PreTrainedModel = class_of(settings.head, config).from_config(
        config, dtype=torch.float32, attn_implementation=attention_of(settings)
    )
    # Ranks that receive the weights, and resumed runs, have the dtypes and the computed buffers of this one.
    empty = build_model_on_meta(settings, dtype=dtype)
    exact, saved = tuple(model._keep_in_fp32_modules_strict or ()), model.state_dict().keys()
    for name, like in [*empty.named_parameters(), *empty.named_buffers(remove_duplicate=False)]:
        parent, _, own = name.rpartition(".")
        module = model.get_submodule(parent)
        if name not in saved:
            setattr(module, own, like)
        elif not any(re.search(pattern, name) for pattern in exact):
            tensor = getattr(module, own)
            tensor.data = tensor.data.to(like.dtype)
    for part in (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return model


def support_packed_rows(model: PreTrainedModel) -> None:
    """Make `model` keep the sequences of a packed row apart where its family does not. Changes it in place."""
    isolate_sequences(model)
    mask_sequences(model)
    mask_images(model)
    attend_to_own_images(model)


def use_no_cache(model: PreTrainedModel) -> None:
    """Leave the cache of keys and values out; generation asks for its own.

    With one, transformers does not look for packed sequences. Of a multimodal model, the text part reads its own
    configuration.
    """
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        config.use_cache = False


def _freeze_as_the_class_does(model: PreTrainedModel) -> None:
    """Freeze parameters that the model class itself freezes, such as biases that balance experts.

    `from_pretrained` makes all of them trainable. Ranks with a meta model and resumed runs do not go through it.
    """
    with init_empty_weights(include_buffers=False):
        made = type(model)(deepcopy(model.config))
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)


def _reset_unused_settings(config: GenerationConfig) -> None:
    """Reset generation settings that have no effect, such as `temperature` without sampling.

    transformers loads such settings, but rejects them when it saves the model.
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


def build_model_on_meta(settings: Model, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of `build_model` with its parameters on the meta device and its buffers on the CPU."""
    return _model_on_meta(load_config(settings), dtype or model_dtype(settings), settings.attention, settings.head)


def build_saved_model(folder: Path, attention: str = "auto") -> PreTrainedModel:
    """The model of a checkpoint, with its parameters on the meta device."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = _model_on_meta(config, config.dtype, attention, head_of(config))
    index = Index(folder)
    set_dtypes(model, {name: index.dtype(name) for name in index})
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def saved_dtype(folder: Path) -> torch.dtype:
    """The dtype of a checkpoint's model."""
    dtype: torch.dtype = AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
    return dtype


def _model_on_meta(config: PretrainedConfig, dtype: torch.dtype, attention: str, head: str) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = class_of(head, config).from_config(
            config, dtype=dtype, attn_implementation=choose_attention(attention, config)
        )
    use_no_cache(model)
    model.config.architectures = [type(model).__name__]
    model.tie_weights()
    share_loss(model)
    support_packed_rows(model)
    return model


def is_on_meta(model: PreTrainedModel) -> bool:
    """Whether the parameters are on the meta device, without memory."""
    return next(model.parameters()).is_meta


def move_to_meta(model: PreTrainedModel) -> dict[str, Tensor]:
    """Move the parameters to the meta device and return the tensors of `model_tensors`; {} if they were there
    already.
    """
    if is_on_meta(model):
        return {}
    taken = model_tensors(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
    model.tie_weights()
    return taken


def materialize(model: PreTrainedModel, device: torch.device, *, buffers_on: torch.device | None = None) -> None:
    """Allocate memory for the parameters of a meta model on `device`, uninitialized. Buffers keep their values."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    for path, buffer in buffers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, buffer.to(buffers_on or device))
    model.tie_weights()


def move_to_device(model: PreTrainedModel, device: torch.device) -> None:
    """Move the model to `device`; the parameters of a meta model get uninitialized memory there."""
    if is_on_meta(model):
        materialize(model, device)
    else:
        model.to(device)


def require_embeddings(model: Model, data: PreparedData) -> None:
    """Raises ValueError if the rows contain a token that the model does not embed. Reads no weights.

    A model's own tokenizer may have more tokens than the model embeds, for example one for images in Gemma 3. No plain
    text becomes such a token, and prepared rows must not contain it.
    """
    tokenizer, name = data.tokenizer(), model.name
    # A multimodal model has its text configuration in a separate section.
    embedded = load_config(model).get_text_config().vocab_size
    if max(tokenizer.get_vocab().values()) >= embedded:
        # Llama 3.2 Vision embeds some tokens more than it predicts.
        embedded = max(embedded, build_model_on_meta(model).get_input_embeddings().weight.shape[0])
    others = {number: token for token, number in tokenizer.get_vocab().items() if number >= embedded}
    if others.keys() - tokenizer.added_tokens_decoder.keys():
        way = f", or a config.json with a vocab_size of at least {len(tokenizer)}" if model.from_scratch else ""
        raise ValueError(
            f"model.tokenizer has {len(tokenizer)} tokens but model.name {name!r} embeds {embedded}; use the model's "
            f"own tokenizer{way}"
        )
    largest = data.manifest.largest_token_id
    if largest in others:
        raise ValueError(
            f"data.source: its rows have the token {others[largest]!r}, number {largest}, but model.name {name!r} "
            f"embeds {embedded}; remove it from the texts; if it is the padding or end token, set another one in the "
            "tokenizer's tokenizer_config.json"
        )
    if others:
        shown = ", ".join(map(repr, list(others.values())[:3])) + (", …" if len(others) > 3 else "")
        log.warning("model.name %r has no embedding for %s of the tokenizer; no row contains them", name, shown)


def set_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a model from scratch the special tokens of its tokenizer; a pretrained model keeps its own."""
    # Of a multimodal model, only the text configuration always has these fields.
    if scores(model):
        # Its forward pass finds the end of a text by this token, which is that of the prepared rows.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    for config in filter(None, (model.config.get_text_config(), getattr(model, "generation_config", None))):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(tokenizer, name))


def freeze_non_text_parameters(model: PreTrainedModel) -> None:
    """Freeze the parameters of a multimodal model that text does not reach.

    They never get a gradient: `ddp` would wait for one, and in flat buffers weight decay would shrink them.
    """
    beyond = beyond_text(model)
    if not beyond:
        return
    for parameter in beyond:
        parameter.requires_grad_(False)
    total = sum(parameter.numel() for parameter in beyond)
    log.info("model: %.1f M parameters for other input than text are frozen", total / 1e6)


def freeze_by_name(model: PreTrainedModel, settings: Model) -> None:
    """Freeze the parameters that `model.freeze` matches, or all that `model.trainable` does not match.

    Raises ValueError if a pattern matches no parameter, or if none is left to train.
    """
    if not (settings.freeze or settings.trainable):
        return
    names = names_of(model)
    if settings.freeze:
        frozen = set().union(*select("model.freeze", settings.freeze, names))
    else:
        frozen = names.keys() - set().union(*select("model.trainable", settings.trainable, names))
    for parameter in frozen:
        parameter.requires_grad_(False)
    trained = [parameter for parameter in names if parameter.requires_grad]
    if not trained:
        field = "model.freeze" if settings.freeze else "model.trainable"
        raise ValueError(f"{field} leaves no weight to train; choose fewer weights to freeze")
    tied = sorted(" = ".join(own) for parameter, own in names.items() if len(own) > 1 and parameter in frozen)
    log.info(
        "model: %d tensors with %.2f M weights are frozen, %d with %.2f M are trained%s",
        len(frozen),
        sum(parameter.numel() for parameter in frozen) / 1e6,
        len(trained),
        sum(parameter.numel() for parameter in trained) / 1e6,
        f"; frozen together, because they are one tensor: {', '.join(tied)}" if tied else "",
    )


def build_planning_model(settings: Model, dtype: torch.dtype) -> PreTrainedModel:
    """The model with everything on the meta device, for planning kernels. `dtype`: that of `compute_dtype`."""
    with torch.device("meta"):
        config = load_config(settings)
        model: PreTrainedModel = class_of(settings.head, config).from_config(
            config,
            # Attention is not an operator of the kernel layer, and these run on meta tensors.
            attn_implementation=choose_attention("auto", config),
            dtype=dtype,
        )
    use_no_cache(model)
    support_packed_rows(model)
    return model


def patch_for_training(model: PreTrainedModel, kernels: Kernels) -> PatchReport | None:
    """`patch`, of a model whose loss training can use: see `require_shared_loss`."""
    report = patch(model, kernels)
    if not has_fused_loss(report):
        require_shared_loss(unwrap(model))
    return report


def require_shared_loss(model: nn.Module) -> None:
    """Raises ValueError unless the model computes its loss by transformers' `loss_function`, or scores texts.

    Only that takes labels that are shifted already, and divides by the tokens of a whole step. The loss of scores is
    computed outside of the model.
    """
    cls = type(model)
    if not scores(model) and "loss_function" not in inspect.unwrap(cls.forward).__code__.co_names:
        raise ValueError(
            f"model.name: {cls.__name__} computes its loss with its own code, which ignores the number of tokens in a "
            "step; choose a causal language model that uses transformers' loss_function"
        )


def has_fused_loss(report: PatchReport | None) -> bool:
    """Whether the patched model computes its loss without materializing logits."""
    return report is not None and "linear_cross_entropy" in report.counts


def patch(model: PreTrainedModel, kernels: Kernels) -> PatchReport | None:
    """Replace the model's operators by those of the kernel layer; None if `kernels.enabled` is false.

    With `kernels.enabled: auto`, what cannot be replaced keeps the model's own code, and the report says why.

    Raises:
        ValueError: `kernels.enabled` is true, and an operator that has a place in the model cannot be put there.
    """
    if not kernels.enabled:
        return None
    # A model that scores texts has no head of tokens.
    exclude = (*kernels.exclude, "linear_cross_entropy") if scores(model) else kernels.exclude
    if kernels.enabled == "auto":
        return patch_model(model, exclude=exclude)
    try:
        return patch_model(model, exclude=exclude, require_all=True)
    except ValueError as error:
        raise ValueError(
            f"kernels.enabled is true, but {error}. Set it to auto, which keeps the model's own code there, or leave "
            "operators out by kernels.exclude"
        ) from error
