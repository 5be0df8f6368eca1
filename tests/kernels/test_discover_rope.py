"""Rotations of families without a row: which functions are proven to be rope, and in which modules."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.llama import modeling_llama

from strata_kernels import patch_model
from strata_kernels.patch.forwards import ROTATIONS
from tests.kernels.test_discover import other_family
from tests.kernels.test_patch import SIZES


def test_a_rotation_the_other_way_round(monkeypatch) -> None:
    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), -sin.unsqueeze(unsqueeze_dim)
        rotate = modeling_llama.rotate_half
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    backwards.__globals__["__name__"], name = modeling_llama.__name__, backwards.__globals__["__name__"]
    try:
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
        kept = patch_model(other_family()).kept["rope"]
    finally:
        backwards.__globals__["__name__"] = name
    assert "rotates in a way that rope does not know" in kept[0]


def test_angles_that_do_not_come_twice(monkeypatch) -> None:
    """The function is one that rope computes; what the model gives it is not."""
    rotary = modeling_llama.LlamaRotaryEmbedding
    original = rotary.forward

    def uneven(self, x, position_ids):
        cos, sin = original(self, x, position_ids)
        return cos + torch.linspace(0, 0.1, cos.shape[-1]), sin

    monkeypatch.setattr(rotary, "forward", uneven)
    assert "angles in another layout" in patch_model(other_family()).kept["rope"][0]


@pytest.fixture
def written_in_llama():
    """Make a function of this file look like one of the modeling file."""
    changed = globals()
    before = changed["__name__"]
    changed["__name__"] = modeling_llama.__name__
    yield
    changed["__name__"] = before


def test_another_axis_by_default(monkeypatch, written_in_llama) -> None:
    original = modeling_llama.apply_rotary_pos_emb

    def apply(q, k, cos, sin, unsqueeze_dim=2):
        return original(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    assert "rotates in a way that rope does not know" in patch_model(other_family()).kept["rope"][0]


def test_learned_angles(monkeypatch) -> None:
    model = other_family()
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.nn.Parameter(rotary._buffers.pop("inv_freq"))
    assert "angles in another layout" in patch_model(model).kept["rope"][0]


class Indexer(modeling_llama.LlamaAttention):
    """What is no attention may rotate tensors of any shape."""


def test_only_attention_rotates() -> None:
    kept = patch_model(other_family(LlamaAttention=Indexer)).kept["rope"]
    assert kept == ("Indexer is no attention of the text model",)


def test_towers_for_images_keep_their_rotation() -> None:
    """Pixtral's has the signature of the text model's, and other shapes."""
    text = {**SIZES, "model_type": "mistral"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**sizes, "model_type": "pixtral", "image_size": 8, "patch_size": 4, "head_dim": 8}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, image_token_index=5)
    model = AutoModelForImageTextToText.from_config(config)
    tower = model.model.vision_tower
    pixels, sizes_of_images = torch.randn(1, 3, 8, 8), torch.tensor([[8, 8]])
    expected = tower(pixels, image_sizes=sizes_of_images).last_hidden_state
    report = patch_model(model)
    assert report.counts["rope"] == 2 and report.kept["rope"] == ("PixtralAttention is no attention of the text model",)
    assert "rope x2" in report.summary() and "rope not everywhere: PixtralAttention" in report.summary()
    torch.testing.assert_close(tower(pixels, image_sizes=sizes_of_images).last_hidden_state, expected)


def test_queries_and_keys_of_two_dtypes() -> None:
    """Under autocast, norms may leave one of them in fp32 (Zaya)."""
    q, k, angle = torch.randn(2, 4, 5, 8).bfloat16(), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    y_q, y_k = ROTATIONS["halves"](q, k, angle.cos(), angle.sin())
    expected_q, expected_k = modeling_llama.apply_rotary_pos_emb(q.float(), k, angle.cos(), angle.sin())
    assert (y_q.dtype, y_k.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y_q, expected_q.bfloat16())
    torch.testing.assert_close(y_k, expected_k)
