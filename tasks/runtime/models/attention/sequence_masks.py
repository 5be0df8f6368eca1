"""Attention masks of families that make them without `position_ids`, so that packed sequences would see each other.

transformers derives the sequences of a packed row from its positions where a family hands them to
`create_causal_mask`; these families do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.runtime.models.attention.attention_choice import VARLEN
from tasks.runtime.models.cache_names import has_cache
from tasks.runtime.models.position_hook import on_positions

# Families whose masks ignore positions, and whether their flash attention gets them.
MASKS_WITHOUT_POSITIONS = {"afmoe": True, "gpt_oss": True, "granitemoehybrid": False}


def mask_sequences(model: PreTrainedModel) -> None:
    """Make the attention of a family of `MASKS_WITHOUT_POSITIONS` keep the sequences of a packed row apart.

    Changes `model` in place; models of other families stay as they are. Flash attention takes no masks.
    """
    flash = MASKS_WITHOUT_POSITIONS.get(model.config.model_type)
    if flash is None or (not flash and _is_flash(model)):
        return
    masks = _Masks(model)
    on_positions(model, masks.read)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and getattr(module, "self_attn", None) is not None:
            module.register_forward_pre_hook(masks.restrict, with_kwargs=True)


def _is_flash(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation.startswith("flash"))


@dataclass
class _Masks:
    """The masks of a forward pass: by that of transformers, which layers of one kind share."""

    model: PreTrainedModel
    positions: Tensor | None = None
    """[B, T]."""
    made: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def read(self, positions: Tensor | None) -> None:
        """Called before each forward pass of the model."""
        self.positions = positions
        self.made.clear()

    def restrict(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before the forward pass of a layer: it attends inside of sequences only."""
        without_masks = _is_flash(self.model) or self.model.config._attn_implementation == VARLEN
        if self.positions is None or has_cache(kwargs) or without_masks:
            return None
        mask = kwargs.get("attention_mask")
        # The mask is kept beside the new one, so that no other gets its id.
        if id(mask) not in self.made:
            self.made[id(mask)] = mask, _restricted(mask, self.positions)
        return args, {**kwargs, "attention_mask": self.made[id(mask)][1]}


def _restricted(mask: Tensor | None, positions: Tensor) -> Tensor:
    """`mask` [B, 1, T, T] without the pairs of tokens of different sequences. None stands for a causal mask."""
    sequence = (positions == 0).cumsum(dim=1)
    same = (sequence[:, :, None] == sequence[:, None, :])[:, None]
    if mask is None:
        return same.tril()
    if mask.dtype == torch.bool:
        return mask & same
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min)
