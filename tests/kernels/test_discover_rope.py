"""Rotations of families without a row: which functions are proven to be rope, and in which modules."""

from functools import wraps

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.utils.deprecation import deprecate_kwarg

from strata_kernels import patch_model
from strata_kernels.patch.forwards import ROTATIONS
from tests.kernels.helpers.tiny_models import build_tiny
from tests.kernels.test_discover import other_family


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


def test_an_attention_inside_of_a_decorator_keeps_it() -> None:
    """As those of transformers from 5.24 on."""
    attention = modeling_llama.LlamaAttention
    renamed = deprecate_kwarg("old", "99.0", new_name="position_embeddings")
    own = {"forward": renamed(renamed(attention.forward)), "__module__": modeling_llama.__name__}
    # Not the class itself, whose patched form is kept.
    model = other_family(LlamaAttention=type("LlamaAttention", (attention,), own))
    assert len(patch_model(model).replaced["rope"]) == 2
    layer, x = model.model.layers[0].self_attn, torch.randn(1, 3, model.config.hidden_size)
    angles = model.model.rotary_emb(x, torch.arange(3)[None])
    with pytest.warns(FutureWarning, match="`old` is deprecated"):
        given = layer(x, attention_mask=None, old=angles)[0]
    torch.testing.assert_close(given, layer(x, attention_mask=None, position_embeddings=angles)[0], atol=0, rtol=0)


def test_a_decorator_that_calls_by_another_way_keeps_its_own_code(monkeypatch) -> None:
    attention = modeling_llama.LlamaAttention
    called = [attention.forward]

    @wraps(attention.forward)
    def forward(self, *args, **kwargs):
        return called[0](self, *args, **kwargs)

    forward.__globals__["__name__"], name = modeling_llama.__name__, forward.__globals__["__name__"]
    try:
        monkeypatch.setattr(attention, "forward", forward)
        kept = patch_model(other_family()).kept["rope"]
    finally:
        forward.__globals__["__name__"] = name
    assert "inside of a decorator that calls it in an unknown way" in kept[0]


def test_only_attention_rotates() -> None:
    kept = patch_model(other_family(LlamaAttention=Indexer)).kept["rope"]
    assert kept == ("Indexer is not an attention module with a configuration",)


# The modules of a text model and of a tower that rotate, of towers that rotate in different ways.
TOWERS = {"qwen2_vl": (2, 1), "llama4": (2, 2), "mistral3": (2, 2), "qwen3_5": (1, 1)}


@pytest.mark.parametrize("model_type", TOWERS)
def test_towers_for_images_rotate_by_the_operator(model_type) -> None:
    report = patch_model(build_tiny(model_type))
    in_tower = [path for path in report.replaced["rope"] if "vision" in path or "visual" in path]
    assert (report.counts["rope"] - len(in_tower), len(in_tower)) == TOWERS[model_type]
    assert "rope" not in report.kept


def test_angles_of_a_tower_are_asked_of_the_tower(monkeypatch) -> None:
    """The function is the same; this tower gives it the angles of rows and columns otherwise."""

    def by_axis(self, freqs):
        rows, columns = freqs[:, 0], freqs[:, 1]
        return torch.cat([rows, rows, columns, columns], dim=-1)

    monkeypatch.setattr(modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding, "recomposition_frequencies", by_axis)
    report = patch_model(build_tiny("qwen2_vl"))
    assert report.counts["rope"] == 2
    assert "VisionAttention calls apply_rotary_pos_emb_vision with angles in another layout" in report.kept["rope"][0]
    assert "rope not everywhere: VisionAttention" in report.summary()


def test_queries_and_keys_of_two_dtypes() -> None:
    """Under autocast, norms may leave one of them in fp32 (Zaya)."""
    q, k, angle = torch.randn(2, 4, 5, 8).bfloat16(), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    y_q, y_k = ROTATIONS["halves"](q, k, angle.cos(), angle.sin())
    expected_q, expected_k = modeling_llama.apply_rotary_pos_emb(q.float(), k, angle.cos(), angle.sin())
    assert (y_q.dtype, y_k.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y_q, expected_q.bfloat16())
    torch.testing.assert_close(y_k, expected_k)
