"""A small random model of any type of transformers that Liger-Kernel knows, and of others without a row."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, MllamaForCausalLM

from tests.runtime.helpers.hybrid_families import RECURRENT

VOCABULARY = 67
# Fields of configurations, of text models and of towers, where they have them.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "depth": 1, "embed_dim": 32, "num_heads": 4,
    "out_hidden_size": 32, "image_size": 8, "patch_size": 4, "projection_dim": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_adapter_dim": 32, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "num_dense_layers": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_PARTLY_ROTATED = {"head_dim": 16, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5}}
# Where these sizes do not fit together, or would not show a factor that is left out.
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "mlp_multipliers": [0.5, 0.7], "lm_head_multiplier": 0.3,
    },
    "gemma2": {"final_logit_softcapping": 5.0},
    "glm4v_moe_text": _PARTLY_ROTATED,
    "glm4v_text": _PARTLY_ROTATED,
    "granite": {"logits_scaling": 3.0},
    "llama4_vision_model": {"intermediate_size": 128},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
}  # fmt: skip


def _sizes(config: Any) -> dict[str, Any]:
    """Changes that make the default configuration small."""
    known = config.to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    layers = known.get("layer_types")
    if "linear_num_key_heads" in known:
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    elif layers and config.model_type != "falcon_h1":
        sizes["layer_types"] = [layers[0], layers[-1]]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            sizes[name] = {"model_type": part.model_type, **_sizes(part)}
    return {**sizes, **RECURRENT.get(config.model_type, {}), **OWN.get(config.model_type, {})}


def build_tiny(model_type: str, **changes: Any) -> nn.Module:
    """The model with its head if the type has one, in fp32 and training mode. changes: of its configuration."""
    config = AutoConfig.for_model(model_type, **{**_sizes(AutoConfig.for_model(model_type)), **changes})
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            model = auto.from_config(config, dtype=torch.float32)
            break
    else:
        # The text model of Mllama, which the automatic classes do not know.
        model = MllamaForCausalLM(config)
    return with_random_weights(model).train()


def with_random_weights(model: nn.Module) -> nn.Module:
    """Weights that do not hide a wrong variant of a norm, as ones and zeros do."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.5 if "norm" in name else 0.0, 0.2, generator=random)
    return model
