"""What the tests of the Liger drop-in share: small models, and what of them is fused."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type: str = "llama", **changes: object) -> nn.Module:
    """A model with random weights, the same at each call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 67, (2, 13), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def train(model: nn.Module, **inputs: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def fused(model: nn.Module) -> set[str]:
    """The kinds of modules that are patched."""
    return {type(m).__name__ for m in model.modules() if "_strata_original" in vars(type(m))}
