"""transformers' dispatch of experts: `experts_implementation="strata"`, for models that nothing else patches."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from torch import Tensor

from .discover import plain_pytorch
from .discover_experts import prove_experts
from .experts_forward import experts_forward
from .small_copy import NotEqual
from .structure import original_class
from .table import Experts

NAME = "strata"
_RECIPE = "_strata_experts"


def register_experts() -> None:
    """Register `experts` in transformers as the experts implementation "strata".

    Equivalent in what it computes, up to rounding, to "eager" and "grouped_mm". A module of experts is proven equal on
    random numbers when it runs for the first time, as by `patch_model`. Calling this again does nothing.

    Raises:
        ImportError: transformers is missing, or is too old to dispatch experts.

    Example:
        >>> register_experts()
        >>> AutoModelForCausalLM.from_pretrained(name, experts_implementation="strata")  # doctest: +SKIP
    """
    import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, strata_experts_forward)


def strata_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for a module of experts.

    Raises:
        ValueError: the module computes something that `experts` does not.
    """
    recipe = vars(self).get(_RECIPE) or _recipe_of(self)
    y: Tensor = experts_forward(_own_forward(self), recipe)(self, hidden_states, top_k_index, top_k_weights)
    return y


def _own_forward(module: Any) -> Any:
    return inspect.unwrap(original_class(module).forward)


def _recipe_of(module: Any) -> Experts:
    """How `module` computes its experts, kept on it: not for its state dict, and not copied into another class."""
    try:
        with plain_pytorch():
            recipe = prove_experts(module)
    except NotEqual as reason:
        raise ValueError(
            f"experts_implementation 'strata' cannot stand for {type(module).__name__}, which {reason}; choose "
            "'grouped_mm' or 'eager'"
        ) from None
    setattr(module, _RECIPE, recipe)
    return recipe


# As `torch.compiler.disable` does, without importing the compiler.
_recipe_of._torchdynamo_disable = True  # type: ignore[attr-defined]
