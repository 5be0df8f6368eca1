"""Whether a model learns to continue a text: it embeds tokens, needs nothing else, and predicts tokens unseen."""

from __future__ import annotations

import inspect

from transformers import PretrainedConfig

from strata_platform.spec.sections.model import Model
from tasks.runtime.models.attention.packing_support import SUPPORTS_PACKING, is_causal, small_model
from tasks.runtime.models.config import load_config
from tasks.runtime.models.media.multimodal import is_multimodal
from tasks.runtime.models.score_head import class_of

_CHOOSE = "choose a causal language model, or one that also takes images or audio"


def require_text_input(model: Model) -> None:
    """Raises ValueError if the model's class takes no tokens, needs other input, or attends to what it is to predict.

    Reads only the configuration. One of which no small model can be built is not probed.
    """
    config = load_config(model)
    if reason := _other_input(model, config):
        raise ValueError(f"model.name {model.name!r}: {reason}; {_CHOOSE}")
    if model.head == "tokens" and not is_multimodal(config) and not _is_known(config):
        small = small_model(config)
        if small is not None and not is_causal(small):
            decoder = getattr(config, "is_decoder", None) is False
            way = ", or set is_decoder to true in its config.json" if decoder else ""
            raise ValueError(
                f"model.name {model.name!r}: {type(small).__name__} attends to the tokens that it is to predict, and "
                f"would learn nothing; choose a causal language model{way}"
            )


def _other_input(model: Model, config: PretrainedConfig) -> str | None:
    """Why the model does not take the tokens of a text alone; None if it does."""
    try:
        config.get_text_config()
    except ValueError:
        parts = [name for name in ("text_encoder", "encoder", "decoder", "generator") if hasattr(config, name)]
        return f"{config.model_type} has several text parts ({', '.join(parts)})"
    cls = class_of(model.head, config)._model_mapping.get(type(config), None)
    if cls is None:
        # Building it says so.
        return None
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    if "input_ids" not in names and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return f"{cls.__name__} takes no input_ids, the tokens of a text"
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if others := [name for name in needed if name != "input_ids"]:
        return f"{cls.__name__} needs {', '.join(others)} beside a text"
    if "decoder_input_ids" in names:
        return f"{cls.__name__} is an encoder with a decoder, which does not continue texts"
    return None


def _is_known(config: PretrainedConfig) -> bool:
    """Whether the family is causal, unless its configuration says otherwise."""
    return config.model_type in SUPPORTS_PACKING and not getattr(config, "use_bidirectional_attention", None)
