"""What transformers calls the cache of a model's generation, which depends on its version and, before 5.24, on the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

# 5.24 calls all of them `cache`.
CACHE_NAMES = ("cache", "cache_params", "past_key_values", "past_key_value")


def cache_name(forward: Callable[..., Any]) -> str:
    """The name of the cache among the arguments of a forward pass."""
    arguments = signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in arguments), "past_key_values")


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether the named arguments of a forward pass hold a cache: then it continues texts, and does not train."""
    return any(arguments.get(name) is not None for name in CACHE_NAMES)
