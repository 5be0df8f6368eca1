"""Fused operators for training language models: Triton on a GPU, plain PyTorch elsewhere."""

from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.rms_norm import rms_norm
from .ops.rope import rope
from .ops.swiglu import swiglu
from .patch import PatchReport, patch_model, unpatch_model

__all__ = ["PatchReport", "linear_cross_entropy", "patch_model", "rms_norm", "rope", "swiglu", "unpatch_model"]
