"""Finds parts of a model: the model inside wrappers, the linear layer of the head, activation functions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ops.experts.experts_arguments import Function

# Modules of decorators in modeling files. Decorators of the package `kernels` replace a function by a module.
_DECORATORS = ("transformers.utils.", "transformers.integrations.", "kernels.")


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` before patching."""
    cls = type(module)
    if "_strata_original" in vars(cls):
        original: type[nn.Module] = vars(cls)["_strata_original"]
        return original
    if hasattr(cls, "_strata_original"):
        raise ValueError(f"{cls.__name__} was derived from a patched class; undo what derived it before the patch")
    return cls


def recipe_of(module: nn.Module) -> Any:
    """The recipe (`table.py`) of a patched module; None if it is not patched."""
    return getattr(type(module), "_strata_recipe", None)


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


def is_own(function: Any, module: str) -> bool:
    """Whether `function` is from the modeling file `module`, with no decorators except the file's."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if home != module and not home.startswith(_DECORATORS):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def linear_head(head: nn.Module) -> nn.Linear:
    """The linear layer that `head` runs: `head` itself, or the module that PEFT currently uses instead.

    Raises:
        ValueError: the head is not a plain linear layer, or has hooks.
    """
    reason = reason_to_call(head)
    if reason is not None:
        raise ValueError(reason)
    linear: Any = _in_use(head)
    found: nn.Linear = linear
    return found


def reason_to_call(head: nn.Module) -> str | None:
    """Why a loss cannot be computed from the weight of `head`, without calling it; None if it can."""
    linear = _in_use(head)
    if type(linear) is not nn.Linear:
        return (
            f"linear_cross_entropy needs an output head that is a plain nn.Linear, not {type(linear).__name__}; "
            "leave the head out of the adapters or the quantization, or pass exclude=('linear_cross_entropy',)"
        )
    if _is_quantized(linear.weight):
        return (
            f"linear_cross_entropy needs an output head with a plain weight, not {type(linear.weight).__name__}; leave "
            "the head out of the quantization, or pass exclude=('linear_cross_entropy',)"
        )
    # The loss reads the head's weight without calling it, so hooks (offloading, weight_norm) would not run.
    if is_hooked(head) or is_hooked(linear):
        return (
            "linear_cross_entropy does not call the output head, which has hooks or a forward of its own; "
            "remove those, or pass exclude=('linear_cross_entropy',)"
        )
    return None


def _is_quantized(weight: Tensor) -> bool:
    """Whether a weight, or its shard, is of a class with its own products, such as torchao's quantized ones."""
    plain = getattr(weight, "_local_tensor", weight)
    return is_traceable_wrapper_subclass(plain)


def _in_use(module: nn.Module) -> nn.Module:
    """The module that `module` runs. PEFT's `modules_to_save` has one trained copy per adapter.

    As in PEFT's forward: the copy of the active adapter, or the original if adapters are disabled or it has no copy.
    """
    if not (type(module).__module__.startswith("peft.") and hasattr(module, "modules_to_save")):
        return module
    wrapper: Any = module
    active = wrapper.active_adapters
    trained = bool(active) and all(name in wrapper.modules_to_save for name in active)
    in_use: nn.Module = wrapper.original_module
    if trained and not wrapper.disable_adapters:
        in_use = wrapper.modules_to_save[active[0]]
    return in_use


def is_plain_linear(module: nn.Module) -> bool:
    """Whether `module(x)` is `torch.nn.functional.linear` with its weight and bias, without hooks.

    False for PEFT or quantized layers, sharded weights, and weights that hooks gather.
    """
    plain = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, Tensor)
    return plain and not is_hooked(module)


def activate_and_project(activate: Callable[..., Tensor], projection: nn.Module) -> Tensor:
    """`projection(activate())`, fused into one operator if the projection has no hooks.

    A layer with a sharded weight may define `project_activation(activate)`, which passes the shard.

    activate: an activation operator with all arguments bound except `weight` and `bias`.
    """
    if is_plain_linear(projection):
        return activate(weight=projection.weight, bias=projection.bias)
    fused: Callable[..., Tensor] | None = getattr(projection, "project_activation", None)
    if fused is not None and not is_hooked(projection):
        return fused(activate)
    y: Tensor = projection(activate())
    return y


def is_hooked(module: nn.Module) -> bool:
    """Whether `module` has hooks or an instance attribute `forward`."""
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return "forward" in module.__dict__ or any(hooks)


# Activation class → function name. "gelu_new", "gelu_fast" and "gelu_accurate" are the tanh approximation in PyTorch.
# Not ReLU: PyTorch saves only its result, which the projection saves anyway, so that fusion would save no memory and
# move 6 instead of 5 itemsizes per element.
_FUNCTIONS = {
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "torch.nn.modules.activation.GELU": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.AccurateGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}
# Operator → its functions, each with the operator's keyword arguments.
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "swiglu": {"silu": {}},
    "geglu": {"gelu": {"approximate": "none"}, "gelu_tanh": {"approximate": "tanh"}},
    "relu_squared": {"relu2": {}},
    "gelu": {
        "gelu": {"approximate": "none"},
        "gelu_tanh": {"approximate": "tanh"},
        "quick_gelu": {"approximate": "sigmoid"},
    },
    "silu": {"silu": {}},
}


def _function_of(activation: nn.Module) -> str | None:
    """The function name of `activation`; None if no operator computes it."""
    cls = type(activation)
    function = _FUNCTIONS.get(f"{cls.__module__}.{cls.__name__}")
    # nn.GELU computes both.
    return "gelu_tanh" if function == "gelu" and getattr(activation, "approximate", None) == "tanh" else function


def activation_options(operator: str, activation: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments with which `operator` computes `activation`; None if it cannot."""
    function = _function_of(activation)
    return None if function is None else _OPTIONS[operator].get(function)


def has_function(activation: nn.Module) -> bool:
    """Whether `experts` computes `activation`."""
    return _function_of(activation) in get_args(Function)


def activation_function(activation: nn.Module) -> Function:
    """The name of an activation in `experts`.

    Raises:
        ValueError: `experts` does not support it.
    """
    if has_function(activation):
        found: Any = _function_of(activation)
        function: Function = found
        return function
    raise ValueError(f"experts computes {_names(get_args(Function))}, not {activation}")


def activations_of(operator: str) -> str:
    """The activations that `operator` computes, for error messages."""
    return _names(_OPTIONS[operator])


def _names(functions: Collection[str]) -> str:
    return ", ".join(name.rpartition(".")[2] for name, function in _FUNCTIONS.items() if function in functions)
