"""Patch a transformers model with the fused operators, and undo it."""

from .engine import PatchReport, patch_model, unpatch_model
from .experts_interface import register_experts

__all__ = ["PatchReport", "patch_model", "register_experts", "unpatch_model"]
