"""Attention of vision-language families whose tokens also see later ones: those of an image each other, or a prompt.

transformers makes their masks from token types, but not for packed rows: it looks up the types of a window at positions
that start again with each sequence, and takes the prompts of a row for one. Here the masks are made of both. They are
those of transformers where a row is one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tasks.runtime.models.cache_names import has_cache
from tasks.runtime.models.position_hook import on_inputs


class _Family(NamedTuple):
    """types: the name of the token types. value: of tokens that see each other. runs: whether only those in a row do,
    as of an image, or all of a sequence, as of a prompt. full: whether layers without a window do. inside: whether
    layers with one do only within it.
    """

    types: str
    value: int
    runs: bool
    full: bool
    inside: bool


_FAMILIES = {
    "gemma3": _Family("token_type_ids", 1, runs=True, full=True, inside=True),
    "gemma4": _Family("mm_token_type_ids", 1, runs=True, full=False, inside=True),
    "paligemma": _Family("token_type_ids", 0, runs=False, full=True, inside=False),
}


def sees_later_tokens(config: PretrainedConfig) -> bool:
    """Whether tokens of an image or a prompt also attend to later ones, which only masks say."""
    if config.model_type == "gemma4":
        # As the larger models.
        return config.get_text_config().use_bidirectional_attention == "vision"
    return config.model_type in _FAMILIES


def types_are_prompts(config: PretrainedConfig) -> bool:
    """Whether `token_type_ids` are 0 in a prompt and 1 in its answer; elsewhere they are 1 for tokens of images."""
    return config.model_type == "paligemma"


def mask_images(model: PreTrainedModel) -> None:
    """Make the masks of a family of `sees_later_tokens` keep the sequences of a packed row apart, in place."""
    if sees_later_tokens(model.config):
        masks = _Masks(model, _FAMILIES[model.config.model_type])
        on_inputs(model, masks.read)
        model.get_decoder().register_forward_pre_hook(masks.put, with_kwargs=True)


@dataclass
class _Masks:
    """Makes the masks of a forward pass."""

    model: PreTrainedModel
    family: _Family
    positions: Tensor | None = None
    types: Tensor | None = None
    """[B, T], both."""

    def read(self, inputs: Mapping[str, Any]) -> None:
        """Called before each forward pass of the model."""
        self.positions, self.types = inputs.get("position_ids"), inputs.get(self.family.types)

    def put(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before the forward pass of the language model. Without positions or types, and for generation, the
        masks stay those of transformers.
        """
        if self.positions is None or self.types is None or has_cache(kwargs):
            return None
        config: Any = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        masks = image_masks(self.family, self.positions, self.types, window)
        if config._attn_implementation == "eager":
            dtype = kwargs["inputs_embeds"].dtype
            masks = {name: torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
                     for name, mask in masks.items()}  # fmt: skip
        mask = masks if window is not None else masks["full_attention"]
        return args, {**kwargs, "attention_mask": mask}


def image_masks(family: _Family, positions: Tensor, types: Tensor, window: int | None) -> dict[str, Tensor]:
    """[B, 1, T, T], bool: whether a query attends to a key, for layers of each kind.

    positions, types: [B, T]; the positions of a sequence begin at 0. window: tokens that a query sees at most.
    """
    starts = positions == 0
    sequence = starts.cumsum(dim=1)
    chosen = types == family.value
    group = sequence
    if family.runs:
        before = torch.nn.functional.pad(chosen, (1, 0))[:, :-1] & ~starts
        group = (chosen & ~before).cumsum(dim=1)
    together = chosen[:, :, None] & chosen[:, None, :] & _equal(group)
    own = _equal(sequence)
    places = torch.arange(positions.shape[1], device=positions.device)
    distance = places[:, None] - places
    causal = distance >= 0
    masks = {"full_attention": own & (causal | together if family.full else causal)}
    if window is not None:
        near = distance < window
        masks["sliding_attention"] = own & (near & (causal | together) if family.inside else near & causal | together)
    return {name: mask[:, None] for name, mask in masks.items()}


def _equal(numbers: Tensor) -> Tensor:
    """[B, T] → [B, T, T]"""
    return numbers[:, :, None] == numbers[:, None, :]
