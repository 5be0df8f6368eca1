"""transformers' AutoModelForCausalLM, with the fused operators in the model that it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from .patch import patch_model

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "strata_kernels.auto builds on transformers, which strata-kernels itself does not need: "
        "pip install 'transformers>=5.17,<5.24'"
    ) from error

_log = logging.getLogger(__name__)


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):  # type: ignore[misc]
    """`transformers.AutoModelForCausalLM`, then `patch_model`.

    Takes what the base class takes, and `exclude`: operators to leave as the model has them.

    Raises:
        ValueError: as `patch_model`.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype="auto")  # doctest: +SKIP
    """

    @classmethod
    def from_pretrained(cls, *args: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Any:
        """Load a model and patch it."""
        return _patched(super().from_pretrained(*args, **kwargs), exclude)

    @classmethod
    def from_config(cls, *args: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Any:
        """Build a model with random weights and patch it."""
        return _patched(super().from_config(*args, **kwargs), exclude)


def _patched(model: Any, exclude: Iterable[str]) -> Any:
    _log.info(patch_model(model, exclude=exclude).summary())
    return model
