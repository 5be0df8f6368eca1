"""A small mixture of experts as others leave it: a folder with weights, configuration and tokenizer."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.runtime.data.preparation.tokenizer import read_tokenizer
from tasks.runtime.models.build import set_special_tokens
from tests.runtime.helpers.pretrained_folder import save_pretrained


def save_mixture(folder, **changes):
    """Fill `folder` with two layers of a Qwen3-MoE of random weights; `changes` are those of its configuration."""
    tokenizer = read_tokenizer(str(save_pretrained(folder)), None, field="model.name")
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "tie_word_embeddings": False, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**sizes, **changes}))
    set_special_tokens(model, tokenizer)
    model.save_pretrained(folder)
    return folder
