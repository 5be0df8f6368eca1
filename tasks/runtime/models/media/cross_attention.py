"""Images of Llama 3.2 Vision (`mllama`): texts attend to them in layers of their own, and take in no tokens of them.

The mask of these layers is of all tokens that follow an image. In transformers, tokens before it attend to all images
of the batch, also to those that pad the row: a row would depend on the others. Here they see the images of their row
alone, as they do where it has no others beside it, and a row without images passes by these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


def has_cross_attention(config: PretrainedConfig) -> bool:
    """Whether images are no tokens of the text."""
    return config.model_type == "mllama"


def cross_attention_inputs(inputs: Mapping[str, Any], ids: Tensor, image_token: int) -> dict[str, Tensor]:
    """What the model takes for the images of a batch, one text in each row.

    inputs: of the image processor, for the rows that have images. ids: [B, T], with a token for each image.
    """
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    stretches = [get_cross_attention_token_mask(row, image_token) for row in ids.tolist()]
    with_images = [row for row, found in enumerate(stretches) if found]
    made: dict[str, Tensor] = {}
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        made[name] = inputs[name].new_zeros(len(stretches), *inputs[name].shape[1:])
        made[name][with_images] = inputs[name]
    # As the processor fills up a row that has fewer images.
    made["aspect_ratio_mask"][..., 0] = 1
    tiles: list[list[int]] = [[] for _ in stretches]
    for row, numbers in zip(with_images, inputs["num_tiles"], strict=True):
        tiles[row] = list(numbers)
    dense = convert_sparse_cross_attention_mask_to_dense(
        stretches, tiles, made["aspect_ratio_mask"].shape[-1], ids.shape[1]
    )
    return made | {"cross_attention_mask": torch.from_numpy(dense)}


def attend_to_own_images(model: PreTrainedModel) -> None:
    """Make the rows of a batch independent of each other's images, in place; other families stay as they are."""
    if not has_cross_attention(model.config):
        return
    vision = model.config.vision_config
    own = _OwnImages(vision.max_num_tiles * ((vision.image_size // vision.patch_size) ** 2 + 1))
    for layer in cross_attention_layers(model):
        layer.register_forward_pre_hook(own.restrict, with_kwargs=True)
        layer.register_forward_hook(own.pass_by, with_kwargs=True)


def cross_attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that attend to images."""
    return [module for module in model.modules() if hasattr(module, "cross_attn")]


@dataclass
class _OwnImages:
    size: int
    """Keys of an image."""

    def restrict(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before the forward pass of a layer: tokens before all images of a row see these images alone."""
        # [B, 1, T, K], 0 for a key that a token sees; [B, 1, T, 1], 0 for a token before all images.
        mask, follows = kwargs.get("cross_attention_mask"), kwargs.get("full_text_row_masked_out_mask")
        if mask is None or follows is None:
            return None
        seen = ((mask == 0) & (follows != 0)).any(dim=2, keepdim=True)
        seen = seen.unflatten(-1, (-1, self.size)).any(dim=-1).repeat_interleave(self.size, dim=-1)
        hidden = torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)
        return args, {**kwargs, "cross_attention_mask": torch.where(follows != 0, mask, hidden)}

    def pass_by(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
        """A hook after it: a row without images leaves the layer as it came."""
        follows = kwargs.get("full_text_row_masked_out_mask")
        if follows is None:
            return output
        before: Tensor = args[0] if args else kwargs["hidden_states"]
        return torch.where((follows != 0).any(dim=2), output, before)
