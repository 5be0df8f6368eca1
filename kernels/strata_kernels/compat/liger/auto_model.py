"""`liger_kernel.transformers.AutoLigerKernelForCausalLM`."""

from __future__ import annotations

from typing import Any

from .apply import _apply_liger_kernel_to_instance
from .families import FLAGS

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "AutoLigerKernelForCausalLM needs transformers: pip install 'transformers>=5.17,<5.25'"
    ) from error


class AutoLigerKernelForCausalLM(transformers.AutoModelForCausalLM):  # type: ignore[misc]
    """`transformers.AutoModelForCausalLM` that patches the models it returns, and no others.

    Its methods have the arguments of the base class, and the flags of the family's `apply_liger_kernel_to_*`.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model and patch it."""
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        # A tuple with output_loading_info=True.
        _apply_liger_kernel_to_instance(loaded[0] if isinstance(loaded, tuple) else loaded, **flags)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Build a model with random weights and patch it."""
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        model = super().from_config(config, **kwargs)
        _apply_liger_kernel_to_instance(model, **flags)
        return model
