"""Put the fused operators into a transformers model, and take them out again."""

from .engine import PatchReport, patch_model, unpatch_model

__all__ = ["PatchReport", "patch_model", "unpatch_model"]
