"""Masks of families whose images or prompts see later tokens: transformers' own, for each sequence of a packed row."""

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model as gemma3_masks
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask
from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model as gemma4_masks

from strata_platform.spec.sections.model import Model
from tasks.runtime.models.build import build_model
from tasks.runtime.models.media.image_masks import _FAMILIES, image_masks, sees_later_tokens
from tests.runtime.helpers import vision_models

WINDOW = 6
# An image longer than a window, two that touch, and one at each end; of a prompt, 0 are its tokens.
TYPES = ("0111111110010", "1101100001", "000", "0011")
PROMPTS = ("0000000001111", "0000011111", "111", "0001")


def row(texts):
    """Positions and types [1, T] of sequences in a row."""
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    return positions, torch.tensor([int(digit) for text in texts for digit in text])[None]


def transformers_masks(family, types):
    config = AutoConfig.for_model("gemma3_text", sliding_window=WINDOW, vocab_size=8, attn_implementation="sdpa")
    # By position: the name of the cache, which is None as the mask is, depends on the version.
    common = (config, torch.zeros(*types.shape, 4), None, None, torch.arange(types.shape[1])[None])
    if family == "paligemma":
        blocks = torch.where(types == 0, 0, -1)
        return {
            "full_attention": create_causal_mask(*common, block_sequence_ids=blocks),
            "sliding_attention": create_sliding_window_causal_mask(*common, block_sequence_ids=blocks),
        }
    make = gemma3_masks if family == "gemma3" else gemma4_masks
    return make(*common, block_sequence_ids=get_block_sequence_ids_for_mask(types))


@pytest.mark.parametrize("family", _FAMILIES)
def test_each_sequence_of_a_row_has_the_mask_that_it_has_alone(family):
    texts = PROMPTS if family == "paligemma" else TYPES
    found = image_masks(_FAMILIES[family], *row(texts), WINDOW)
    for kind, mask in found.items():
        alone = [transformers_masks(family, row([text])[1])[kind] for text in texts]
        # None is a causal mask.
        blocks = [torch.ones(len(text), len(text)).tril() if one is None else one[0, 0].float()
                  for text, one in zip(texts, alone, strict=True)]  # fmt: skip
        assert torch.equal(mask[0, 0].float(), torch.block_diag(*blocks)), kind


@pytest.mark.parametrize("family", _FAMILIES)
def test_eager_attention_is_that_of_sdpa(family, tmp_path):
    make = vision_models.FAMILIES[family]
    folder = make(tmp_path, text="gemma") if family == "paligemma" else make(tmp_path)
    positions, types = row(PROMPTS if family == "paligemma" else TYPES)
    inputs = {"input_ids": torch.arange(20, 20 + types.shape[1])[None], "position_ids": positions,
              _FAMILIES[family].types: types}  # fmt: skip
    eager, sdpa = (
        build_model(Model(name=str(folder), attention=attention), 0).eval()(**inputs).logits
        for attention in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager, sdpa, rtol=1e-4, atol=1e-5)


def test_small_models_of_gemma_4_are_causal():
    assert not sees_later_tokens(AutoConfig.for_model("gemma4"))
    assert sees_later_tokens(AutoConfig.for_model("gemma4", text_config={"use_bidirectional_attention": "vision"}))
