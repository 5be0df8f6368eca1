"""Models that score texts: a linear layer without bias, `score`, makes one number of a text's last hidden state."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from strata_platform.spec.sections.model import SCORE, Model
from tasks.runtime.models.media.multimodal import auto_class, is_multimodal

_CLASS = "ForSequenceClassification"


def class_of(head: str, config: PretrainedConfig) -> Any:
    """The class of transformers that builds the model of a configuration with this head, `tokens` or `score`."""
    return AutoModelForSequenceClassification if head == "score" else auto_class(config)


def head_of(config: PretrainedConfig) -> str:
    """The head, `tokens` or `score`, of a model whose folder has this configuration."""
    return "score" if any(name.endswith(_CLASS) for name in config.architectures or ()) else "tokens"


def options_of(head: str) -> dict[str, Any]:
    """Fields of the configuration of a model with this head, `tokens` or `score`."""
    return {"num_labels": 1} if head == "score" else {}


def scores(model: nn.Module) -> bool:
    """Whether `model` scores texts."""
    return isinstance(getattr(model, SCORE, None), nn.Linear)


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Give the head random weights, unless it is on the meta device; transformers' own depend on what else was loaded
    before.
    """
    weight = model.get_parameter(f"{SCORE}.weight")
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    weight.data = (torch.randn(weight.shape, generator=generator) * std).to(weight.dtype)


def score_positions(model: PreTrainedModel) -> None:
    """Make `model`, if it scores texts, return the score of each position as `logits` [B, T], for packed rows.

    transformers' own forward pass returns that of the last token of a row alone.
    """
    if scores(model):
        model.forward = MethodType(_forward, model)


def _forward(self: Any, *args: Any, **kwargs: Any) -> SequenceClassifierOutput:
    hidden = getattr(self, self.base_model_prefix)(*args, **kwargs).last_hidden_state
    return SequenceClassifierOutput(logits=self.score(hidden).squeeze(-1))


def require_one_score(source: str, config: PretrainedConfig, *, trained: bool = False) -> None:
    """Raises ValueError if `source`, which has this configuration, scores texts by more than one number.

    trained: whether it must have a head for one score already.
    """
    base = "" if trained else ", or the language model that it was trained from, which gets a new head for one score"
    if head_of(config) == "score" and config.num_labels != 1:
        raise ValueError(
            f"model.name {source!r} is a classifier with {config.num_labels} scores for a text (num_labels); a reward "
            f"model has one. Give a reward model with num_labels 1{base}"
        )


def require_score_head(model: Model) -> None:
    """Raises ValueError if `model` scores texts and transformers has no such model of this family, or it has several
    scores.
    """
    from tasks.runtime.models.config import load_config

    if model.head != "score":
        return
    config = load_config(model)
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if found is None or config.is_encoder_decoder or is_multimodal(config):
        raise ValueError(
            f"objective.type 'reward': transformers has no AutoModelForSequenceClassification of model.name "
            f"{model.name!r} ({config.model_type}); choose a model of another family, such as Llama, Qwen or Mistral"
        )
    if not model.from_scratch:
        require_one_score(model.name, load_config(model.with_head("tokens")))
