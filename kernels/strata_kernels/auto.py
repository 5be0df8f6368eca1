"""transformers' AutoModelForCausalLM, which patches the models that it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from .patch import patch_model

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "strata_kernels.auto needs transformers, which strata-kernels does not install: "
        "pip install 'transformers>=5.17,<5.25'"
    ) from error

_log = logging.getLogger(__name__)


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):  # type: ignore[misc]
    """`transformers.AutoModelForCausalLM`, then `patch_model`.

    Its methods have the arguments of the base class, and `exclude` for `patch_model`.

    Raises:
        ValueError: as `patch_model`.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype="auto")  # doctest: +SKIP
    """

    @classmethod
    def from_pretrained(cls, *args: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Any:
        """Load a model and patch it. With `output_loading_info=True`, a tuple of the model and this information."""
        loaded = super().from_pretrained(*args, **kwargs)
        if isinstance(loaded, tuple):
            model, information = loaded
            return _patched(model, exclude), information
        return _patched(loaded, exclude)

    @classmethod
    def from_config(cls, *args: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Any:
        """Build a model with random weights and patch it."""
        return _patched(super().from_config(*args, **kwargs), exclude)


def _patched(model: Any, exclude: Iterable[str]) -> Any:
    report = patch_model(model, exclude=exclude)
    _log.log(logging.INFO if report.replaced else logging.WARNING, report.summary())
    return model
