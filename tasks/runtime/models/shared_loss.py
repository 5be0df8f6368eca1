"""The loss of families whose forward pass computes one by itself: here by transformers' `loss_function`, as elsewhere.

Qwen2-Audio averages over the targets of a micro-batch. Only `loss_function` takes labels that are shifted already, and
divides by the tokens of a whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from tasks.runtime.models.cache_names import cache_name


def _qwen2_audio(
    self: Any,
    input_ids: Any = None,
    input_features: Any = None,
    attention_mask: Any = None,
    feature_attention_mask: Any = None,
    position_ids: Any = None,
    inputs_embeds: Any = None,
    labels: Any = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    name = cache_name(self.model.forward)
    past = {name: kwargs.pop(name, None)}
    # Its processor expands the tokens of audio, so that labels stay where they are.
    outputs = self.model(
        input_ids=input_ids,
        input_features=input_features,
        attention_mask=attention_mask,
        feature_attention_mask=feature_attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **past,
        **kwargs,
    )
    logits = self.lm_head(outputs.last_hidden_state)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.text_config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        **{name: outputs.get(name)},
    )


_FORWARDS: dict[str, Callable[..., Any]] = {"Qwen2AudioForConditionalGeneration": _qwen2_audio}


def share_loss(model: PreTrainedModel) -> None:
    """Make `model` compute its loss by `loss_function`, in place; other families stay as they are."""
    cls: Any = type(model)
    if cls.__name__ in _FORWARDS and cls.__module__ != __name__:
        model.__class__ = _with_shared_loss(cls)


@cache
def _with_shared_loss(cls: Any) -> Any:
    # Folders of the model have the name of its class, and so do logs.
    forward: Any = can_return_tuple(_FORWARDS[cls.__name__])
    # Generation looks for the name of the cache there.
    forward.__signature__ = signature(cls.forward)
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": __name__})
