"""Models with other input than text: their class, what they support, and what text does not reach in them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.data import MEDIA_FIELDS
from strata_platform.spec.sections.objectives import LABELLED, PAIRED
from tasks.runtime.data import PreparedData
from tasks.runtime.data.formats.columns import PREFERENCES
from tasks.runtime.data.media.media_packing import require_separate_media
from tasks.runtime.models.media.cross_attention import cross_attention_layers
from tasks.runtime.models.media.image_masks import sees_later_tokens

AUDIO_FAMILIES = ("qwen2_audio", "voxtral")
"""Families that take audio, which transformers builds by a class of their own."""


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether a model takes other input than text: its text part has a configuration of its own."""
    return config.get_text_config() is not config


def has_rope_index(model: nn.Module) -> bool:
    """Whether the model rotates by positions in three dimensions, which it computes from tokens and images (M-RoPE)."""
    return hasattr(getattr(model, "model", None), "get_rope_index")


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that builds the model of a configuration: of a multimodal model, the one with its tower.

    For some families `AutoModelForCausalLM` has no class, and for others one that leaves the tower out.
    """
    if is_multimodal(config) and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    if config.model_type in AUDIO_FAMILIES:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def require_planned_media_support(spec: RunSpec) -> None:
    """`require_media_support` before data is prepared, if the spec names images or audio. Of others, preparation finds
    out.
    """
    if any(getattr(data, field) is not None for data, _ in spec.data.single_sources() for field in MEDIA_FIELDS):
        _require_media_support(spec, packing=spec.data.packing, pairs=spec.objective.type in PAIRED)


def require_media_support(spec: RunSpec, data: PreparedData) -> None:
    """Raises ValueError if rows have images or audio and a section of the spec does not go with that."""
    if data.manifest.has_media:
        pairs = data.manifest.format in PREFERENCES
        _require_media_support(spec, packing=data.manifest.packing, pairs=pairs)


def _require_media_support(spec: RunSpec, *, packing: bool, pairs: bool) -> None:
    if spec.objective.type in LABELLED:
        raise ValueError(
            f"objective.type {spec.objective.type!r} does not support rows with images or audio; choose 'sft' or "
            "'dpo', or name their column in data.ignore_columns"
        )
    config = AutoConfig.from_pretrained(spec.model.name, revision=spec.model.revision, trust_remote_code=False)
    require_separate_media(
        config.model_type, spec.model.name, packing=packing, pairs=spec.objective.type if pairs else None
    )
    if spec.model.attention.startswith("flash") and sees_later_tokens(config):
        raise ValueError(
            f"model.attention {spec.model.attention!r}: {config.model_type} attends to later tokens of an image or a "
            "prompt, which flash attention does not; set model.attention to 'auto'"
        )
    for ways, field in ((spec.parallel.context_parallel, "context"), (spec.parallel.tensor_parallel, "tensor")):
        if ways > 1:
            raise ValueError(
                f"parallel.{field}_parallel {ways} does not support rows with images or audio; set it to 1, or name "
                "their column in data.ignore_columns"
            )


def beyond_text(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of a multimodal model that text does not reach; none of another."""
    if not is_multimodal(model.config):
        return []
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    reached -= {id(parameter) for layer in cross_attention_layers(model) for parameter in layer.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in reached]
