"""Families whose masks ignore positions: their packed sequences see each other only without `mask_sequences`."""

import pytest
import torch
from transformers import DynamicCache

from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.attention.packing_support import supports_packing
from tasks.runtime.models.attention.sequence_masks import MASKS_WITHOUT_POSITIONS, _Masks, mask_sequences
from tasks.runtime.models.build import support_packed_rows
from tasks.runtime.models.cache_names import CACHE_NAMES
from tests.runtime.helpers.hybrid_families import (
    MASKED,
    POSITIONS,
    TOKENS,
    assert_same,
    build_family,
    run_alone,
    run_packed,
)


def test_each_family_of_the_table_is_tested():
    assert MASKED.keys() == MASKS_WITHOUT_POSITIONS.keys()


@pytest.mark.parametrize(
    ("family", "attention"),
    [("gpt_oss", "eager"), ("afmoe", "eager"), ("afmoe", "sdpa"), ("granitemoehybrid", "sdpa")],
)
def test_packed_sequences_train_as_they_do_alone(family, attention):
    model = build_family(family, attn_implementation=attention)
    expected = run_alone(model)
    assert not supports_packing(model)
    support_packed_rows(model)
    assert_same(run_packed(model), expected)
    checkpoint_activations(model, Training(gradient_checkpointing="full"))
    assert_same(run_packed(model), expected)


def test_rows_of_one_sequence_and_generation_are_unchanged():
    model = build_family("gpt_oss").eval()
    positions = torch.arange(100).expand(2, 100)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    expected = model(input_ids=TOKENS, position_ids=positions).logits, model.generate(TOKENS[:, :9], **options)
    support_packed_rows(model)
    model(input_ids=TOKENS, position_ids=POSITIONS)
    assert torch.equal(model(input_ids=TOKENS, position_ids=positions).logits, expected[0])
    assert torch.equal(model(input_ids=TOKENS).logits, expected[0])
    assert torch.equal(model.generate(TOKENS[:, :9], **options), expected[1])


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_layer_that_continues_texts_keeps_its_mask(name):
    """Under each name that a version of transformers gives the cache."""
    masks = _Masks(build_family("gpt_oss"))
    masks.read(POSITIONS)
    given = {"attention_mask": None, name: None}
    assert masks.restrict(masks.model, (), given) is not None
    assert masks.restrict(masks.model, (), given | {name: DynamicCache()}) is None


@pytest.mark.parametrize(("family", "hooked"), [("gpt_oss", True), ("granitemoehybrid", False)])
def test_masks_are_not_counted_on_where_flash_attention_gets_no_positions(family, hooked):
    """The probe runs on the CPU with another attention, and would find the masks there."""
    model = build_family(family)
    model.config._attn_implementation_internal = "flash_attention_2"
    mask_sequences(model)
    assert any(layer._forward_pre_hooks for layer in model.model.layers) == hooked
