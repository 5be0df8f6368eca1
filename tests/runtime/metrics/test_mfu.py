"""Model FLOPs, by the formula written out for each kind of model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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


# Tables of positions; layers whose heads differ in size, with tables of their own; keys and values of other sizes.
UNEQUAL = {
    "llama": {},
    "gpt2": {"n_positions": 128},
    "gemma4_text": {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 512, "vocab_size_per_layer_input": 1000,
        "hidden_size_per_layer_input": 8, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(("family", "fields"), UNEQUAL.items(), ids=UNEQUAL)
def test_attention_takes_half_of_the_products_that_pytorch_counts(family, fields):
    shape = {name: size for name, size in SHAPE.items() if name not in ("head_dim", "sliding_window")}
    shape |= {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2}
    config = AutoConfig.for_model(family, **shape | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.arange(64)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    # Eager attention computes every key of a row, also those that a mask hides; all else multiplies matrices.
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "bmm" in str(name)) / 64
    attention = flops_per_token(model, 128) - flops_per_token(model, 64)
    assert attention == pytest.approx(counted / 2, rel=0.01)
    # Norms count as products here, a few percent of this small model.
    rest = counter.get_total_flops() / 64 - counted
    assert flops_per_token(model, 64) - attention == pytest.approx(rest, rel=0.03)


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
