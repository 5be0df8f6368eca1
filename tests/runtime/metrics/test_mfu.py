"""Model FLOPs, by the formula written out for each kind of model."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from strata_platform.estimate import shape_of
from strata_platform.estimate.speed import model_flops
from tasks.runtime.metrics.mfu import Mfu, flops_per_token, peak_flops

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": None,
}
T = 512
TABLE, HEAD = 1000 * 64, 1000 * 64
ATTENTION = 64 * (4 * 32) * 2 + 64 * (2 * 32) * 2
MLP, NORMS = 3 * 64 * 96, 2 * 64
LAYERS = 3 * (ATTENTION + MLP + NORMS) + 64
KEYS = 3 * 4 * 32 * (T / 2)


def build(kind, config, **changes):
    with torch.device("meta"):
        return kind(config(**SHAPE | changes))


@pytest.mark.parametrize("tied", [False, True])
def test_the_table_counts_only_where_it_is_the_head(tied):
    model = build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=tied)
    assert flops_per_token(model, T) == 6 * (LAYERS + HEAD) + 12 * KEYS


def test_weights_that_do_not_learn_have_no_gradient():
    model = build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    assert flops_per_token(model, T) == 4 * (LAYERS + HEAD) + 2 * 64 + 12 * KEYS


def test_a_window_is_all_that_a_token_sees():
    model = build(MistralForCausalLM, MistralConfig, sliding_window=128)
    # On average over a row: each position as many as there are before it, itself included, up to the window.
    seen = pytest.approx(sum(min(position, 128) for position in range(1, T + 1)) / T, rel=1e-2)
    attention = flops_per_token(model, T) - 6 * (LAYERS + HEAD)
    assert attention / (12 * 3 * 4 * 32) == seen


def test_of_experts_those_count_that_a_token_is_sent_to():
    model = build(MixtralForCausalLM, MixtralConfig, num_local_experts=8, num_experts_per_tok=2)
    layers = 3 * (ATTENTION + 2 * MLP + 8 * 64 + NORMS) + 64
    assert flops_per_token(model, T) == 6 * (layers + HEAD) + 12 * KEYS


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(device, peak):
    assert peak_flops(device) == peak


def test_utilization_is_a_share_of_all_devices():
    assert Mfu(flops_per_token=2e9, peak=2 * 1e12).of(400.0) == 0.4


def test_the_estimate_counts_the_same_flops(tmp_path):
    model = build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path)
    # But for the norms, which it leaves out.
    expected = model_flops(shape_of(str(tmp_path)), T)
    assert flops_per_token(model, T) == pytest.approx(expected, rel=5e-3)
