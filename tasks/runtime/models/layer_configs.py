"""What configurations say of layers: one configuration for each, and the size of its heads."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """The configuration of each layer of a text configuration; one for all layers is repeated.

    Layers of Gemma 4 differ in the size of their heads. transformers then raises an error, no AttributeError, where the
    size is read from the whole configuration.
    """
    if getattr(config, "is_heterogeneous", False):
        each: Sequence[PretrainedConfig] = config.per_layer_config
        return each
    return [config] * int(config.num_hidden_layers)


def head_width(config: PretrainedConfig) -> int:
    """Values of a head: `head_dim`, or its default."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
