"""Reading the parts of a model: what is inside its wrappers, the linear layer that is its head, its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside `torch.compile`, DistributedDataParallel and PEFT, in any nesting."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        elif inner is None and type(model).__module__.startswith("peft."):
            inner = model.get_base_model()  # type: ignore[operator]
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def linear_head(head: nn.Module) -> nn.Linear:
    """The plain linear layer that `head` is, or that PEFT trains in its place.

    Raises:
        ValueError: the head does more than a matrix product with its own weight, or is hooked to.
    """
    if type(head).__module__.startswith("peft.") and hasattr(head, "modules_to_save"):
        adapters: Any = head.modules_to_save
        head = adapters[head.active_adapter]
    if type(head) is not nn.Linear:
        raise ValueError(
            f"linear_cross_entropy needs an output head that is a plain nn.Linear, not {type(head).__name__}; "
            "leave the head out of the adapters or the quantization, or pass exclude=('linear_cross_entropy',)"
        )
    # Its weight is read and its forward not called: what hangs on the call (offloading, weight_norm) would be left out.
    if "forward" in head.__dict__ or head._forward_pre_hooks or head._forward_hooks:
        raise ValueError(
            "linear_cross_entropy does not call the output head, which has hooks or a forward of its own; "
            "remove those, or pass exclude=('linear_cross_entropy',)"
        )
    return head


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling `module` is `torch.nn.functional.linear` with its weight and bias, and nothing hangs on the call.

    Not so where PEFT or a quantization stands in its place, a strategy has cut its weight, or hooks fetch it.
    """
    plain = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, Tensor)
    return plain and not _is_hooked(module)


def projected(activate: Callable[..., Tensor], projection: nn.Module) -> Tensor:
    """`projection(activate())`, in one where nothing hangs on the call of the projection.

    A layer that computes with a part of its weight may offer `project_activation(activate)`, which passes the part.

    activate: an operator that takes weight and bias along, with all else given.
    """
    if is_plain_linear(projection):
        return activate(weight=projection.weight, bias=projection.bias)
    together: Callable[..., Tensor] | None = getattr(projection, "project_activation", None)
    if together is not None and not _is_hooked(projection):
        return together(activate)
    y: Tensor = projection(activate())
    return y


def _is_hooked(module: nn.Module) -> bool:
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return "forward" in module.__dict__ or any(hooks)


# "gelu_new" is the tanh approximation written out.
_ACTIVATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "swiglu": {"transformers.activations.SiLUActivation": {}, "torch.nn.modules.activation.SiLU": {}},
    "geglu": {
        "transformers.activations.GELUActivation": {"approximate": "none"},
        "transformers.activations.GELUTanh": {"approximate": "tanh"},
        "transformers.activations.NewGELUActivation": {"approximate": "tanh"},
    },
    "relu_squared": {"transformers.activations.ReLUSquaredActivation": {}},
}


def activation_options(operator: str, activation: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments with which `operator` computes `activation`; None if it does not."""
    cls = type(activation)
    return _ACTIVATIONS[operator].get(f"{cls.__module__}.{cls.__name__}")


def activations_of(operator: str) -> str:
    """The names of the activations that `operator` computes, as error messages list them."""
    return ", ".join(name.rpartition(".")[2] for name in _ACTIVATIONS[operator])
