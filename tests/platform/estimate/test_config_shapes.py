"""Shapes of models, from their configurations."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata_platform.estimate.config_shapes import FAMILIES, from_config

# Sizes of which no two are alike, under every name that a family has for them.
SIZES = {
    "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 500, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 56, "pad_token_id": 0,
}  # fmt: skip
# Settings that change which weights there are.
VARIANTS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "qwen3": {"attention_bias": True, "head_dim": 32},
    "gemma": {"head_dim": 32},
    "starcoder2": {"use_bias": False},
    "stablelm": {"use_qkv_bias": True},
    "qwen2_moe": {"qkv_bias": False},
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Special tokens of a family's own vocabulary are not among 500."""
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_counted_as_the_model_has_them(kind):
    """Those that transformers makes, from what it writes to a config.json: tied, not, and by the family's default."""
    for changes in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, VARIANTS.get(kind, {})):
        config = AutoConfig.for_model(kind, **SIZES, **changes)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape = from_config(json.loads(config.to_json_string()))
        assert shape.parameters == model.num_parameters()
        assert shape.lora_parameters(4) == adapters(model, 4)
        assert shape.layers * sum(a * b for a, b in shape.expert_adapters(4)) == of_experts(model, 4)


def adapters(model, rank):
    """Parameters of LoRA on all linear layers but the head."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)


def of_experts(model, rank):
    """Parameters of PEFT's LoRA on all experts: of each, as many as on a matrix of its shape."""
    weights = [p for name, p in model.named_parameters() if p.dim() == 3]
    return sum(rank * w.shape[0] * (w.shape[1] + w.shape[2]) for w in weights)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (
            {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
             "num_experts_per_tok": 2}, 46.7, 12.9,
        ),
        (
            {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
             "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
             "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}, 30.5, 3.3,
        ),
        (
            {"model_type": "gemma3", "text_config": {
             "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}}, 3.9, 3.9,
        ),
        (
            {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064}, 3.8, 3.8,
        ),
    ],
    ids=["Mixtral 8x7B", "Qwen3 30B A3B", "Gemma 3 4B", "Phi-3 mini"],
)  # fmt: skip
def test_well_known_models_have_their_published_sizes(config, total, active):
    """In billions; of Gemma's 4.3 the language model has 3.9."""
    shape = from_config(config)
    assert (shape.parameters / 1e9, shape.active_parameters / 1e9) == pytest.approx((total, active), abs=0.06)
    assert (shape.unread is not None) == (config["model_type"] == "gemma3")


MIXTURE = {"model_type": "qwen3_moe", **SIZES}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**MIXTURE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({**MIXTURE, "mlp_only_layers": [0]}, "some layers have experts and some an MLP"),
        ({"model_type": "deepseek_v3", **SIZES}, "model_type 'deepseek_v3' is not supported by the estimate"),
    ],
)
def test_a_shape_that_is_not_known_is_told(config, said):
    with pytest.raises(ValueError, match=said):
        from_config(config)
