"""Two-layer models of families with recurrent layers, or with masks that ignore positions."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 67
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = LINEAR | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}

RECURRENT = {
    "qwen3_next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16, "head_dim": 8},
    "qwen3_5_text": DELTA | {"head_dim": 8},
    "olmo_hybrid": DELTA,
    "kimi_linear": LINEAR | {
        "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2, "linear_num_heads": 4,
        "linear_head_dim": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "moe_intermediate_size": 16, "num_key_value_heads": 4,
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA2 | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 1,
        "layer_types": ["linear_attention", "full_attention"], "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "jamba": {
        "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "zamba2": {
        "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 8, "mamba_headdim": 16,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1} | EXPERTS,
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
    "minimax": LINEAR | {"num_local_experts": 4, "block_size": 16, "head_dim": 8},
}  # fmt: skip
MASKED = {
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": SLIDING | EXPERTS | {"num_dense_layers": 1},
    "granitemoehybrid": RECURRENT["granitemoehybrid"],
}


def build_family(family, **changes):
    """A model in fp32 with random weights, in training mode; the same each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | (RECURRENT | MASKED)[family], use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **changes).train()


# Two rows of four sequences and one; lengths that share a call and some that do not.
LENGTHS = [[5, 70, 1, 24], [100]]
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
TOKENS = torch.randint(3, VOCABULARY, POSITIONS.shape, generator=torch.Generator().manual_seed(1))
# Of the logits in a loss.
WEIGHTS = torch.randn(*POSITIONS.shape, VOCABULARY, generator=torch.Generator().manual_seed(2))


def run_packed(model):
    """Logits of the packed rows and all gradients."""
    logits = model(input_ids=TOKENS, position_ids=POSITIONS).logits
    return logits.detach(), _gradients(model, [(logits * WEIGHTS).sum()])


def run_alone(model):
    """The same with each sequence in a row of its own, which needs no support by anything."""
    logits, losses = torch.empty_like(WEIGHTS), []
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            own = row, slice(begin, begin + length)
            found = model(input_ids=TOKENS[own][None]).logits[0]
            logits[own] = found.detach()
            losses.append((found * WEIGHTS[own]).sum())
            begin += length
    return logits, _gradients(model, losses)


def _gradients(model, losses):
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found, expected):
    """Logits and gradients, relative to the size of each tensor."""
    assert found[1].keys() == expected[1].keys()
    pairs = {"logits": (found[0], expected[0])} | {name: (found[1][name], expected[1][name]) for name in found[1]}
    for name, (ours, theirs) in pairs.items():
        assert torch.isfinite(ours).all(), name
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm() + 1e-6, name
