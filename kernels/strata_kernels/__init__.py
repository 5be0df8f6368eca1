"""Fused operators for training language models: Triton on a GPU, plain PyTorch elsewhere.

Importing this package starts neither CUDA nor a compiler and needs only torch and triton. `AutoModelForCausalLM`
imports transformers when it is first accessed.
"""

from typing import TYPE_CHECKING, Any

from .ops._stable_cache_keys import omit_line_numbers as _omit_line_numbers
from .ops.activation.geglu import geglu, geglu_packed
from .ops.activation.gelu import gelu
from .ops.activation.relu_squared import relu_squared
from .ops.activation.silu import silu
from .ops.activation.swiglu import swiglu, swiglu_packed
from .ops.activation.tiled_mlp import tiled_mlp
from .ops.adamw import adamw_step, join_weight, split_weight, weight_step
from .ops.adamw.eight_bits import EightBitPlan, adamw_8bit_step
from .ops.adamw.shard import Shard
from .ops.adamw.step_plan import Rounding, StepPlan
from .ops.cross_entropy import LossAndPredictions, cross_entropy, cross_entropy_with_predictions
from .ops.cross_entropy.selective_log_softmax import selective_log_softmax
from .ops.divergence.given_logits import jsd, kl_div, tvd
from .ops.dyt import dyt
from .ops.experts.experts import experts
from .ops.experts.experts_arguments import LowRank
from .ops.float8 import linear as _float8  # noqa: F401  # Its kernels are among those whose lines are omitted.
from .ops.group_norm import group_norm
from .ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_predictions
from .ops.linear_cross_entropy.linear_logprobs import (
    LogProbsAndEntropy,
    linear_logprobs,
    linear_logprobs_with_entropy,
)
from .ops.linear_divergence.linear_distillation import DistillationTerms, linear_distillation
from .ops.linear_divergence.linear_jsd import linear_cosine_distance, linear_jsd, linear_kl_div
from .ops.linear_divergence.linear_topk import linear_topk_kl_div
from .ops.linear_preference.linear_pairs import linear_kto, linear_preference
from .ops.linear_preference.linear_policy import linear_grpo
from .ops.lora import gated_layer as _gated_layer  # noqa: F401  # As of FP8.
from .ops.norm.layer_norm import layer_norm
from .ops.norm.modulated_norm import modulated_layer_norm, modulated_rms_norm
from .ops.norm.rms_norm import add_rms_norm, rms_norm
from .ops.poly_norm import poly_norm
from .ops.rotary.qk_norm_rope import qk_norm_rope
from .ops.rotary.rope import rope
from .ops.softmax import softmax
from .ops.sparsemax import sparsemax
from .patch import PatchReport, patch_model, register_experts, unpatch_model

if TYPE_CHECKING:
    from .auto import AutoModelForCausalLM as AutoModelForCausalLM

__all__ = [
    "DistillationTerms",
    "EightBitPlan",
    "LogProbsAndEntropy",
    "LossAndPredictions",
    "LowRank",
    "PatchReport",
    "Rounding",
    "Shard",
    "StepPlan",
    "adamw_8bit_step",
    "adamw_step",
    "add_rms_norm",
    "cross_entropy",
    "cross_entropy_with_predictions",
    "dyt",
    "experts",
    "geglu",
    "geglu_packed",
    "gelu",
    "group_norm",
    "join_weight",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cosine_distance",
    "linear_cross_entropy",
    "linear_cross_entropy_with_predictions",
    "linear_distillation",
    "linear_grpo",
    "linear_jsd",
    "linear_kl_div",
    "linear_kto",
    "linear_logprobs",
    "linear_logprobs_with_entropy",
    "linear_preference",
    "linear_topk_kl_div",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "patch_model",
    "poly_norm",
    "qk_norm_rope",
    "register_experts",
    "relu_squared",
    "rms_norm",
    "rope",
    "selective_log_softmax",
    "silu",
    "softmax",
    "sparsemax",
    "split_weight",
    "swiglu",
    "swiglu_packed",
    "tiled_mlp",
    "tvd",
    "unpatch_model",
    "weight_step",
]

_omit_line_numbers(f"{__name__}.ops")


def __getattr__(name: str) -> Any:
    if name == "AutoModelForCausalLM":
        from .auto import AutoModelForCausalLM

        return AutoModelForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
