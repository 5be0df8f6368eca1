"""Fused operators for training language models: Triton on a GPU, plain PyTorch elsewhere."""

from .ops.rms_norm import rms_norm
from .ops.rope import rope
from .ops.swiglu import swiglu

__all__ = ["rms_norm", "rope", "swiglu"]
