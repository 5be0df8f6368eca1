"""Proof that a module computes the same as `experts`, from tokens, expert indices and router weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import copy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.experts.experts_arguments import Gate
from .experts_forward import experts_forward
from .small_copy import WIDTH, NotEqual, copy_of, is_equal, seeded
from .structure import activation_function, original_class
from .table import Experts

# Tokens, experts and hidden size of a small copy.
_TOKENS, _EXPERTS, _INNER = 6, 5, 24
# The fourth expert has no token; the last token selects one expert twice.
_INDEX = ((0, 1), (4, 0), (1, 2), (2, 4), (4, 1), (2, 2))
# Input scales: large ones reveal limits.
_SCALES = (1.0, 30.0)


def has_experts(module: nn.Module) -> bool:
    """Whether the class name says so, and the weights have an expert axis."""
    stacked = any(parameter.dim() == 3 for parameter in module._parameters.values() if parameter is not None)
    return stacked and "Experts" in original_class(module).__name__


def prove_experts(module: nn.Module) -> Experts:
    """The recipe of the experts that `module` computes.

    Raises:
        NotEqual: the operator does not support them.
    """
    cls = original_class(module)
    own = inspect.unwrap(cls.forward)
    if len(inspect.signature(own).parameters) != 4:
        raise NotEqual("takes something else than hidden states, indices of experts and their weights")
    names, activation = _names(module), _activation(module)
    small, transposed = _small_copy(module, names)
    random = seeded()
    x = torch.randn(_TOKENS, WIDTH, generator=random)
    router = torch.rand(len(_INDEX), len(_INDEX[0]), generator=random) + 0.5
    for variant in _variants(module, names, activation, transposed):
        if _is_equal(small, own, variant, x, router):
            return variant
    raise NotEqual("computes something else than experts with a gate between two products")


def _is_equal(small: nn.Module, own: Any, variant: Experts, x: Tensor, router: Tensor) -> bool:
    """Whether `variant` equals the family's code; in 16 bits, dtypes are equal and values close."""
    index, forward = torch.tensor(_INDEX), experts_forward(own, variant)

    def run(function: Any, x: Tensor, router: Tensor) -> Tensor:
        y: Tensor = function(small, x, index, router)
        return y

    weights = list(small.parameters())
    for scale in _SCALES:
        if not is_equal(partial(run, own), partial(run, forward), scale * x, router, weights=weights):
            return False
    small.half()
    try:
        with torch.no_grad():
            expected, given = (run(function, x.half(), router) for function in (own, forward))
    finally:
        small.float()
    largest = expected.float().abs().max().item()
    return given.dtype == expected.dtype and torch.allclose(given.float(), expected.float(), atol=0.005 * largest)


def _names(module: nn.Module) -> tuple[str, str]:
    """Attribute names of the weights before and after the gate."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    for first in ("gate_up_proj", "up_proj"):
        known = {first, "down_proj", f"{first}_bias", "down_proj_bias"}
        if {first, "down_proj"} <= names <= known:
            return first, "down_proj"
    raise NotEqual(f"has other weights than gate_up_proj and down_proj: {', '.join(sorted(names))}")


def _activation(module: nn.Module) -> str | None:
    """Attribute name of the activation; None for SiLU."""
    children = dict(module.named_children())
    if not children:
        return None
    ((name, child), *others) = children.items()
    if others:
        raise NotEqual(f"has more parts than an activation: {', '.join(children)}")
    try:
        activation_function(child)
    except ValueError as error:
        raise NotEqual(f"has another activation: {error}") from error
    return name


def _small_copy(module: nn.Module, names: tuple[str, str]) -> tuple[Any, bool]:
    """(small copy with random weights, whether weights are transposed)."""
    first, down = (getattr(module, name) for name in names)
    if first.dim() != 3 or down.dim() != 3:
        raise NotEqual(f"has weights of shapes {list(first.shape)} and {list(down.shape)}")
    transposed = bool(getattr(module, "is_transposed", False))
    experts, width, inner = down.shape if not transposed else (down.shape[0], down.shape[2], down.shape[1])
    width_up = first.shape[2 if transposed else 1]
    fits = tuple(first.shape) == ((experts, width, width_up) if transposed else (experts, width_up, width))
    if not fits or width_up not in (inner, 2 * inner):
        raise NotEqual(f"has weights of shapes {list(first.shape)} and {list(down.shape)}")
    # Preserve equality and factor 2 between the real sizes: attributes only hold sizes.
    small_inner = {inner: WIDTH, 2 * inner: WIDTH // 2}.get(width, _INNER)
    sizes = {width: WIDTH, inner: small_inner, 2 * inner: 2 * small_inner}
    small_experts = sizes.setdefault(experts, _EXPERTS)
    small = copy_of(module, sizes)
    # The copy has plain weights, so the module's storage format does not apply.
    vars(small).pop("restore_weight", None)
    products = [(sizes[width_up], WIDTH), (WIDTH, small_inner)]
    random = seeded()
    for name, (outputs, inputs) in zip(names, products, strict=True):
        shape = (small_experts, inputs, outputs) if transposed else (small_experts, outputs, inputs)
        setattr(small, name, nn.Parameter(0.5 * torch.randn(shape, generator=random)))
        if module._parameters.get(f"{name}_bias") is not None:
            bias = 0.5 * torch.randn(small_experts, outputs, generator=random)
            setattr(small, f"{name}_bias", nn.Parameter(bias))
    for name, child in module.named_children():
        setattr(small, name, copy(child))
    return small, transposed


def _variants(module: nn.Module, names: tuple[str, str], activation: str | None, transposed: bool) -> Iterator[Experts]:
    """Candidate variants for a module with these attributes."""
    gate_up, down = names
    if gate_up == "up_proj":
        yield Experts(gate_up, down, transposed, activation, "none")
        return
    values = {name: float(v) for name, v in vars(module).items() if type(v) in (int, float) and v > 0}
    # Values of the module's attributes first.
    alphas = [*(value for name, value in values.items() if "alpha" in name), 1.0]
    limits = [*(value for name, value in values.items() if "limit" in name), None]
    offsets = (1.0, 0.0) if alphas[1:] else (0.0, 1.0)
    gates: tuple[Gate, Gate] = ("halves", "interleaved")
    if not getattr(module, "is_concatenated", True):
        gates = gates[::-1]
    for gate, alpha, limit, offset in product(gates, alphas, limits, offsets):
        yield Experts(gate_up, down, transposed, activation, gate, alpha, limit, offset)
