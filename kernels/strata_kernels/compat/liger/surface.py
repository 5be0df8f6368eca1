"""The modules of Liger-Kernel 0.8.5: which names each has here, and what to use instead of the others."""

from __future__ import annotations

from .families import FAMILIES

# Liger's version, and that it is not Liger: a requirement such as liger-kernel>=0.8.0 accepts it.
VERSION = "0.8.5+strata"

_OPS = {
    "cross_entropy": "LigerCrossEntropyFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_moe": "LigerFusedMoEFunction",
    "geglu": "LigerGELUMulFunction",
    "layer_norm": "LigerLayerNormFunction",
    "llama4_rope": "LigerLlama4RopeFunction",
    "mlp": "LigerMLPFunction",
    "qwen2vl_mrope": "LigerQwen2VLMRopeFunction",
    "relu_squared": "LigerReLUSquaredFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "sparsemax": "LigerSparsemaxFunction",
    "swiglu": "LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
}
_MODULES = {
    "fused_add_rms_norm": "LigerFusedAddRMSNorm",
    "geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
    "layer_norm": "LigerLayerNorm",
    "mlp": "LigerMLP LigerFalconH1MLP",
    "relu_squared": "LigerReLUSquared",
    "sparsemax": "LigerSparsemax",
    "rms_norm": (
        "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
        "LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered LigerRMSNormForOlmo2 LigerRMSNormForGlm4 "
        "LigerRMSNormForQwen3Next"
    ),
    "swiglu": (
        "LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerBlockSparseTop2MLP LigerExperts LigerPhi3SwiGLUMLP "
        "LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerFalconH1SwiGLUMLP"
    ),
}
_LOSSES = {
    "cross_entropy": "LigerCrossEntropyLoss",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyLoss",
}
_DIVERGENCES = {
    "jsd": ("LigerJSDFunction", "LigerJSD"),
    "kl_div": ("LigerKLDivLossFunction", "LigerKLDIVLoss"),
    "fused_linear_jsd": ("LigerFusedLinearJSDFunction", "LigerFusedLinearJSD"),
}
_PAIRS = ("DPO", "CPO", "SimPO", "ORPO", "KTO")
_ROTATIONS = {
    "rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    "llama4_rope": "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb",
    "qwen2vl_mrope": "liger_multimodal_rotary_pos_emb",
}
_FUNCTIONAL = (
    "CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy liger_geglu liger_layer_norm "
    "liger_qwen2vl_mrope liger_relu_squared liger_rms_norm liger_fused_add_rms_norm liger_rope liger_sparsemax "
    "liger_swiglu"
)
_DISPATCHED = (
    "cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd kl_div layer_norm rms_norm "
    "rope swiglu"
)
_APPLY = "_apply_liger_kernel _apply_liger_kernel_to_instance " + " ".join(
    f"apply_liger_kernel_to_{name}" for name in FAMILIES
)


def _names(*providers: tuple[str, str]) -> dict[str, str]:
    """Name → the module of this package that has it."""
    return {name: provider for provider, names in providers for name in names.split()}


# Module of Liger, without `liger_kernel.` → its names, each with the module of this package that has it.
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
    "ops": _names(
        ("functions", " ".join(_OPS.values())),
        ("divergences", " ".join(function for function, _ in _DIVERGENCES.values())),
    ),
    **{f"ops.{module}": _names(("functions", names)) for module, names in _OPS.items()},
    **{f"ops.{module}": _names(("divergences", function)) for module, (function, _) in _DIVERGENCES.items()},
    **{f"transformers.{module}": _names(("divergences", " ".join(names))) for module, names in _DIVERGENCES.items()},
    "chunked_loss": _names(("chunked_pairs", " ".join(f"LigerFusedLinear{name}Loss" for name in _PAIRS))),
    "chunked_loss.functional": _names(
        ("chunked_pairs", " ".join(f"liger_fused_linear_{name.lower()}" for name in _PAIRS)),
    ),
    **{
        f"chunked_loss.{name.lower()}_loss": _names(
            ("chunked_pairs", f"LigerFusedLinear{name}Loss LigerFusedLinear{name}Function"),
        )
        for name in _PAIRS
    },
    "transformers": _names(
        ("auto_model", "AutoLigerKernelForCausalLM"),
        ("apply", _APPLY),
        ("modules", " ".join(_MODULES.values())),
        ("loss_modules", " ".join(_LOSSES.values())),
        ("divergences", " ".join(module for _, module in _DIVERGENCES.values())),
        ("functional", " ".join(_ROTATIONS.values())),
        ("device", "is_transformers_available"),
    ),
    "transformers.auto_model": _names(("auto_model", "AutoLigerKernelForCausalLM")),
    "transformers.monkey_patch": _names(
        ("apply", f"{_APPLY} MODEL_TYPE_TO_APPLY_LIGER_FN"),
        ("modules", " ".join(_MODULES.values())),
        ("loss_modules", " ".join(_LOSSES.values())),
        ("functional", f"liger_cross_entropy {' '.join(_ROTATIONS.values())}"),
    ),
    "transformers.trainer_integration": _names(("apply", "_apply_liger_kernel")),
    "transformers.functional": _names(
        ("functional", _FUNCTIONAL),
        ("divergences", "liger_jsd liger_kl_div liger_fused_linear_jsd"),
    ),
    **{f"transformers.{module}": _names(("functional", names)) for module, names in _ROTATIONS.items()},
    **{f"transformers.{module}": _names(("modules", names)) for module, names in _MODULES.items()},
    **{f"transformers.{module}": _names(("loss_modules", names)) for module, names in _LOSSES.items()},
}

# What to use → names and modules of Liger that Strata has not, with their package where the name says too little.
_INSTEAD = {
    "the logits and PyTorch's losses": (
        "LigerFusedCETVDFunction LigerFusedCETVDLoss LigerFusedLinearCosineSimilarityFunction "
        "LigerFusedLinearCosineSimilarityLoss LigerFusedLinearKLDivFunction LigerFusedLinearKLDivLoss "
        "cosine_similarity_loss fused_ce_tvd fused_linear_kl_div liger_fused_linear_cosine liger_fused_linear_kl_div"
    ),
    "strata_kernels.tvd, of logits": "LigerTVDLoss LigerTVDLossFunction liger_tvd tvd",
    "strata_kernels.linear_jsd": "LigerFusedLinearJSDLoss jsd_loss",
    "strata_kernels.linear_grpo": (
        "GrpoLossFunction LigerFusedLinearGRPOFunction LigerFusedLinearGRPOLoss grpo_loss liger_fused_linear_grpo "
        "triton_grpo_loss"
    ),
    "the loss's module of chunked_loss": (
        "fused_linear_distillation fused_linear_ppo fused_linear_preference fused_linear_unpaired_preference"
    ),
    "torch.softmax": "LigerSoftmax LigerSoftmaxFunction liger_softmax softmax",
    "torch.nn.functional.group_norm": "LigerGroupNorm LigerGroupNormFunction group_norm liger_group_norm",
    "torch.tanh(alpha * x) * weight + bias": "LigerDyT LigerDyTFunction dyt liger_dyt",
    "torch.nn.functional.embedding": "LigerEmbeddingFunction experimental",
    "torch.nn.functional.conv2d on masked scores": (
        "LigerMultiTokenAttention LigerMultiTokenAttentionFunction liger_multi_token_attention multi_token_attention"
    ),
    "torch.nn.attention.flex_attention": (
        "LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionFunction fused_neighborhood_attention "
        "liger_fused_neighborhood_attention"
    ),
    "torch.utils.checkpoint": (
        "LigerTiledGEGLUMLP LigerTiledMLPFunction LigerTiledSwiGLUMLP apply_tiled_mlp tiled_mlp"
    ),
    "PyTorch": (
        "LigerAttnResFunction LigerMHC LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction "
        "LigerPolyNorm LigerPolyNormFunction attn_res liger_attn_res "
        "liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre liger_poly_norm "
        "mhc poly_norm"
    ),
    "strata_kernels.rms_norm(x, weight) * (1 + scale) + shift": (
        "LigerModulatedRMSNorm LigerModulatedRMSNormFunction liger_modulated_rms_norm modulated_rms_norm"
    ),
    "strata_kernels.linear_cross_entropy(x / temperature, ...)": (
        "LigerFusedLinearScaledCrossEntropyFunction fused_linear_scaled_cross_entropy"
    ),
    "strata_kernels.linear_cross_entropy(..., group=)": (
        "LigerFusedLinearScaledCrossEntropyTPFunction LigerVocabParallelCEFunction LigerVocabParallelCrossEntropy "
        "liger_fused_linear_scaled_cross_entropy_tp vocab_parallel_cross_entropy"
    ),
    "strata_kernels.patch_model": "transformers.fsdp transformers.model",
    "strata_kernels.experts": "LigerExpertParallelFusedMoe fused_moe_kernels transformers.moe",
    "strata_kernels, its operators in Megatron's modules": "megatron",
    "apply_liger_kernel_to_llama4": "apply_liger_llama4_rope_full",
    "trl.experimental.orpo.ORPOTrainer": "transformers.trainer LigerORPOTrainer",
    "strata_kernels.warmup, which fills Triton's own cache": "triton",
    "torch.cuda.get_device_capability": "infer_device_arch",
    "the one implementation of each operator, without a choice": (
        "available_backends available_impls backends configure cute cutedsl cutile get_backend get_impl set_backend "
        "set_impl"
    ),
    "your own, as these are helpers of Liger's kernels and tests": "env_report ops.utils testing",
}
INSTEAD = {name: advice for advice, names in _INSTEAD.items() for name in names.split()}
# The functions around a kernel, such as rms_norm_forward.
_PARTS = ("_forward", "_backward", "_fwd", "_bwd", "_kernel", "_triton")


def instead_of(name: str) -> str | None:
    """What to use for a name or a module of Liger that is not provided; None if Liger has no such name."""
    short = name.rpartition(".")[2]
    if short.endswith(_PARTS) and not short.startswith("_"):
        return "`apply` of the autograd function, whose backward pass is registered"
    return INSTEAD.get(name) or INSTEAD.get(short)
