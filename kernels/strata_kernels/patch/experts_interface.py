"""`experts_implementation="strata"` for transformers' dispatch of experts, without `patch_model`."""

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

    Equal up to rounding to "eager" and "grouped_mm". At its first call, a module of experts is compared with `experts`
    on random input, as by `patch_model`. Calling this function again has no effect.

    Raises:
        ImportError: transformers is missing, or is too old to dispatch experts.

    Example:
        >>> register_experts()
        >>> AutoModelForCausalLM.from_pretrained(name, experts_implementation="strata")  # doctest: +SKIP
    """
    import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, strata_experts_forward)


def strata_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls for a module of experts.

    Raises:
        ValueError: `experts` does not support the module.
    """
    recipe = vars(self).get(_RECIPE) or _recipe_of(self)
    y: Tensor = experts_forward(_own_forward(self), recipe)(self, hidden_states, top_k_index, top_k_weights)
    return y


def _own_forward(module: Any) -> Any:
    return inspect.unwrap(original_class(module).forward)


def _recipe_of(module: Any) -> Experts:
    """The recipe of `module`, cached on it: not in its state dict, and invalid after its class changes."""
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


# As `torch.compiler.disable`, without importing the compiler.
_recipe_of._torchdynamo_disable = True  # type: ignore[attr-defined]
