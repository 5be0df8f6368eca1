"""Put the fused operators into a transformers model, and take them out again."""

from .engine import PatchReport, patch_model, unpatch_model
from .experts_interface import register_experts

__all__ = ["PatchReport", "patch_model", "register_experts", "unpatch_model"]
