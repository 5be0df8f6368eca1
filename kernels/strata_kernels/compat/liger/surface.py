"""The modules and names of Liger-Kernel 0.8.5 that Strata provides, and replacements for the others."""

from __future__ import annotations

from .families import FAMILIES

# Liger's version with a local label: satisfies requirements such as liger-kernel>=0.8.0.
VERSION = "0.8.5+strata"

# Module of this package → module of Liger's `ops` → names.
_OPS = {
    "norms": {
        "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
        "layer_norm": "LigerLayerNormFunction",
        "rms_norm": "LigerRMSNormFunction",
    },
    "other_norms": {
        "dyt": "LigerDyTFunction",
        "group_norm": "LigerGroupNormFunction",
        "modulated_rms_norm": "LigerModulatedRMSNormFunction",
        "poly_norm": "LigerPolyNormFunction",
    },
    "feed_forward": {
        "fused_moe": "LigerFusedMoEFunction",
        "geglu": "LigerGELUMulFunction",
        "mlp": "LigerMLPFunction",
        "relu_squared": "LigerReLUSquaredFunction",
        "swiglu": "LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
        "tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    },
    "rotations": {
        "llama4_rope": "LigerLlama4RopeFunction",
        "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
        "rope": "LigerRopeFunction",
    },
    "distributions": {"softmax": "LigerSoftmaxFunction", "sparsemax": "LigerSparsemaxFunction"},
    "cross_entropies": {
        "cross_entropy": "LigerCrossEntropyFunction",
        "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
        "fused_linear_scaled_cross_entropy": "LigerFusedLinearScaledCrossEntropyFunction",
    },
    "divergences": {
        "fused_ce_tvd": "LigerFusedCETVDFunction",
        "fused_linear_jsd": "LigerFusedLinearJSDFunction",
        "jsd": "LigerJSDFunction",
        "kl_div": "LigerKLDivLossFunction",
        "tvd": "LigerTVDLossFunction",
    },
}
# The same for Liger's `transformers`.
_MODULES = {
    "norms": {
        "fused_add_rms_norm": "LigerFusedAddRMSNorm",
        "layer_norm": "LigerLayerNorm",
        "rms_norm": (
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
            "LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 "
            "LigerRMSNormForGlm4 LigerRMSNormForQwen3Next"
        ),
    },
    "other_norms": {
        "dyt": "LigerDyT",
        "group_norm": "LigerGroupNorm",
        "modulated_rms_norm": "LigerModulatedRMSNorm",
        "poly_norm": "LigerPolyNorm",
    },
    "feed_forward": {
        "geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
        "mlp": "LigerMLP LigerFalconH1MLP",
        "relu_squared": "LigerReLUSquared",
        "swiglu": (
            "LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerBlockSparseTop2MLP LigerExperts LigerPhi3SwiGLUMLP "
            "LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerFalconH1SwiGLUMLP"
        ),
        "tiled_mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
    },
    "distributions": {"softmax": "LigerSoftmax", "sparsemax": "LigerSparsemax"},
    "cross_entropies": {
        "cross_entropy": "CrossEntropyOutput LigerCrossEntropyLoss",
        "fused_linear_cross_entropy": "CrossEntropyOutput LigerFusedLinearCrossEntropyLoss",
    },
    "divergences": {
        "fused_ce_tvd": "LigerFusedCETVDLoss",
        "fused_linear_jsd": "LigerFusedLinearJSD",
        "jsd": "LigerJSD",
        "kl_div": "LigerKLDIVLoss",
        "tvd": "LigerTVDLoss",
    },
    "rotations": {
        "llama4_rope": "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb",
        "qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
        "rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    },
    "policies": {"grpo_loss": "triton_grpo_loss"},
}
_FUNCTIONAL = {
    "norms": "liger_layer_norm liger_rms_norm liger_fused_add_rms_norm",
    "other_norms": "liger_dyt liger_group_norm liger_modulated_rms_norm liger_poly_norm",
    "feed_forward": "liger_geglu liger_relu_squared liger_swiglu",
    "rotations": "liger_qwen2vl_mrope liger_rope",
    "distributions": "liger_softmax liger_sparsemax",
    "cross_entropies": "CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy",
    "divergences": "liger_fused_linear_jsd liger_jsd liger_kl_div liger_tvd",
}
_DISPATCHED = (
    "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div layer_norm rms_norm "
    "rope softmax swiglu"
)
# Module of this package → module of Liger's `chunked_loss` → infix of its class names, and its function.
_CHUNKED = {
    "chunked_pairs": {
        f"{name.lower()}_loss": (name, f"liger_fused_linear_{name.lower()}")
        for name in ("DPO", "CPO", "SimPO", "ORPO", "KTO")
    },
    "chunked_distillation": {
        "cosine_similarity_loss": ("CosineSimilarity", "liger_fused_linear_cosine"),
        "jsd_loss": ("JSD", "liger_fused_linear_jsd"),
    },
    "policies": {"grpo_loss": ("GRPO", "liger_fused_linear_grpo")},
}
_APPLY = "_apply_liger_kernel _apply_liger_kernel_to_instance " + " ".join(
    f"apply_liger_kernel_to_{name}" for name in FAMILIES
)


def _names(*providers: tuple[str, str]) -> dict[str, str]:
    """Name → module of this package that defines it."""
    return {name: provider for provider, names in providers for name in names.split()}


def _all(table: dict[str, dict[str, str]]) -> dict[str, str]:
    """`_names` of all modules of a table."""
    return _names(*((provider, " ".join(modules.values())) for provider, modules in table.items()))


def _each(package: str, table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Module of Liger → `_names`, of each module of a table."""
    return {
        f"{package}.{module}": _names((provider, names))
        for provider, modules in table.items()
        for module, names in modules.items()
    }


def _in_transformers() -> dict[str, dict[str, str]]:
    """The modules of `transformers`, each including the names of the `ops` module of the same name."""
    functions = _each("ops", _OPS)
    # And names that they import from other modules.
    functions["ops.swiglu"] |= functions["ops.fused_moe"]
    functions["ops.tiled_mlp"] |= _names(("feed_forward", "LigerGELUMulFunction LigerSiLUMulFunction"))
    return {
        name: {**functions.get(name.replace("transformers", "ops", 1), {}), **names}
        for name, names in _each("transformers", _MODULES).items()
    }


_CHUNKED_LOSSES = {
    provider: {
        module: f"LigerFusedLinear{middle}Loss LigerFusedLinear{middle}Function"
        for module, (middle, _) in modules.items()
    }
    for provider, modules in _CHUNKED.items()
}
_LIGER_FUNCTIONS = _names(
    *((provider, function) for provider, modules in _CHUNKED.items() for _, function in modules.values())
)

# Module of Liger, without `liger_kernel.` → name → module of this package that defines it.
PROVIDED: dict[str, dict[str, str]] = {
    "": {},
    "functional": _names(("dispatched", _DISPATCHED)),
    "utils": _names(
        (
            "device",
            "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device is_npu_available is_peft_available "
            "transformers_version_dispatch",
        ),
    ),
    "ops": _all(_OPS),
    **_each("ops", _OPS),
    # axolotl wraps these functions.
    "ops.fused_linear_cross_entropy": _names(
        ("cross_entropies", _OPS["cross_entropies"]["fused_linear_cross_entropy"]),
        ("causal_loss", "fused_linear_cross_entropy_backward fused_linear_cross_entropy_forward"),
    ),
    "chunked_loss": {name: at for name, at in _all(_CHUNKED_LOSSES).items() if name.endswith("Loss")},
    "chunked_loss.functional": {
        **_LIGER_FUNCTIONS,
        **{name: at for name, at in _all(_CHUNKED_LOSSES).items() if name.endswith("Function")},
    },
    **_each("chunked_loss", _CHUNKED_LOSSES),
    "transformers": {
        **_names(
            ("auto_model", "AutoLigerKernelForCausalLM"), ("apply", _APPLY), ("device", "is_transformers_available")
        ),
        **_all(_MODULES),
    },
    **_in_transformers(),
    "transformers.auto_model": _names(
        ("auto_model", "AutoLigerKernelForCausalLM"), ("apply", "MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel")
    ),
    "transformers.monkey_patch": {
        **_names(
            ("apply", f"{_APPLY} MODEL_TYPE_TO_APPLY_LIGER_FN"),
            ("cross_entropies", "liger_cross_entropy"),
            ("device", "PEFT_AVAILABLE"),
        ),
        **_all(_MODULES),
    },
    "transformers.model": {},
    "transformers.model.loss_utils": _names(
        ("causal_loss", "LigerForCausalLMLoss fixed_fused_linear_cross_entropy unpack_cross_entropy_result"),
        ("cross_entropies", "CrossEntropyOutput"),
    ),
    "transformers.fsdp": _names(("causal_loss", "_FSDPForwardRedirection")),
    "transformers.trainer": {},
    "transformers.trainer.orpo_trainer": _names(
        ("causal_loss", "_FSDPForwardRedirection"), ("chunked_pairs", "LigerFusedLinearORPOLoss")
    ),
    "transformers.trainer_integration": _names(("apply", "_apply_liger_kernel")),
    "transformers.functional": {**_all(_OPS), **_names(*_FUNCTIONAL.items())},
}

# Replacement → names and modules of Liger that Strata lacks, with their package if the name is ambiguous.
_INSTEAD = {
    "strata_kernels.kl_div, of logits": (
        "LigerFusedLinearKLDivFunction LigerFusedLinearKLDivLoss fused_linear_kl_div liger_fused_linear_kl_div"
    ),
    "liger_kernel.transformers.grpo_loss.triton_grpo_loss": (
        "GrpoLossFunction ops.grpo_loss fused_selective_log_softmax"
    ),
    "the loss's module of chunked_loss": (
        "LigerFusedLinearDistillationBase LigerFusedLinearPPOBase LigerFusedLinearPreferenceBase "
        "LigerFusedLinearUnpairedPreferenceBase fused_linear_distillation fused_linear_ppo fused_linear_preference "
        "fused_linear_unpaired_preference"
    ),
    "torch.nn.functional.embedding": "LigerEmbeddingFunction experimental",
    "torch.nn.functional.conv2d on masked scores": (
        "LigerMultiTokenAttention LigerMultiTokenAttentionFunction liger_multi_token_attention multi_token_attention"
    ),
    "torch.nn.attention.flex_attention": (
        "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionFunction fused_neighborhood_attention "
        "liger_fused_neighborhood_attention"
    ),
    "PyTorch": (
        "LigerAttnResFunction LigerMHC LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction attn_res "
        "liger_attn_res liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre mhc"
    ),
    "strata_kernels.linear_logprobs(..., group=)": (
        "LigerFusedLinearScaledCrossEntropyTPFunction liger_fused_linear_scaled_cross_entropy_tp"
    ),
    "strata_kernels.linear_cross_entropy(..., group=)": (
        "LigerVocabParallelCEFunction LigerVocabParallelCrossEntropy vocab_parallel_cross_entropy"
    ),
    "strata_kernels.experts": "LigerExpertParallelFusedMoe fused_moe_kernels transformers.moe",
    "strata_kernels, its operators in Megatron's modules": "megatron",
    "apply_liger_kernel_to_llama4": "apply_liger_llama4_rope_full",
    "trl.experimental.orpo.ORPOTrainer": "LigerORPOTrainer",
    "strata_kernels.warmup, which fills Triton's own cache": "triton",
    "torch.cuda.get_device_capability": "infer_device_arch",
    "the one implementation of each operator, without a choice": (
        "available_backends available_impls backends configure cute cutedsl cutile declare_op_locations dispatch "
        "get_backend get_impl set_backend set_impl"
    ),
    "your own, as these are helpers of Liger's kernels and tests": (
        "BLOCK_M_TOKEN DTYPE_SUPPORT_LIST IS_TRANSFORMERS_V5_OR_LATER LOG2_E MAX_FUSED_SIZE "
        "MIN_SUPPORTED_TRANSFORMERS_VERSION REDUCTION_LITERAL TensorDescriptor _nvidia_shared calculate_settings "
        "clip_coef_fn compare_version compute_routing_metadata device_context ensure_contiguous env_report gemm_swiglu "
        "get_bucket_m get_gamma_weights get_npu_core_count get_num_warps is_hip k3_loss_fn logger ops.utils "
        "sapo_loss_fn set_large_grf_mode silu swiglu_backward_dGU swiglu_backward_dI testing torch_to_triton_dtype "
        "transformer_version"
    ),
    "strata_kernels.patch_model": (
        "_bind_method_to_module _patch_geglu_module _patch_layer_norm_module _patch_rms_norm_module "
        "_patch_swiglu_module"
    ),
    "liger_kernel.transformers.functional": "F",
}
INSTEAD = {name: advice for advice, names in _INSTEAD.items() for name in names.split()}
# Suffixes of launch functions and kernels, such as rms_norm_forward.
_PARTS = ("_forward", "_backward", "_fwd", "_bwd", "_kernel", "_triton")


def instead_of(name: str) -> str | None:
    """The replacement for a name or module of Liger that is not provided; None if Liger has no such name."""
    short = name.rpartition(".")[2]
    if short.startswith("__"):
        return None
    if name == f"transformers.model.{short}":
        return "strata_kernels.patch_model"
    if name.startswith("ops.") and short in PROVIDED["utils"]:
        # Liger's kernel modules import these names.
        return f"liger_kernel.utils.{short}"
    if short.endswith(_PARTS) and not short.startswith("_"):
        return "`apply` of the autograd function, whose backward pass is registered"
    return INSTEAD.get(name) or INSTEAD.get(short)
