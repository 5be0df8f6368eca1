"""Small copies of a model's modules, with the code of their class, and comparing them with an operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from .structure import original_class

# Features of a small copy, and the shape of its input.
WIDTH = 16
SHAPE = (2, 3, WIDTH)
# The difference that fp32 may make, as a share of the largest value.
_ROUNDING = 5e-6

# What every module has.
INTERNALS = frozenset(vars(nn.Module()))


class NotEqual(Exception):
    """Why a module keeps its own code."""


def seeded(seed: int = 0) -> torch.Generator:
    """Random numbers that leave the caller's alone."""
    return torch.Generator("cpu").manual_seed(seed)


def takes_one_tensor(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` has one parameter, which callers may pass by position."""
    kinds = [parameter.kind for parameter in inspect.signature(cls.forward).parameters.values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(kinds) == 2 and kinds[1] in by_position


def copy_of(module: nn.Module, sizes: dict[int, int]) -> Any:
    """An instance of the module's own class with its attributes, but without children and weights.

    sizes: real size → that of the copy, where attributes hold one.
    """
    small: Any = object.__new__(original_class(module))
    nn.Module.__init__(small)
    for name, value in vars(module).items():
        if name in INTERNALS:
            continue
        if type(value) is int:
            value = sizes.get(value, value)
        elif type(value) is tuple and all(type(size) is int for size in value):
            value = tuple(sizes.get(size, size) for size in value)
        vars(small)[name] = value
    for name, parameter in module._parameters.items():
        if parameter is None:
            small.register_parameter(name, None)
    return small.train()


def random_linear(features: int, outputs: int, like: Any, random: torch.Generator) -> nn.Linear:
    """A linear layer with random weights, and with a bias if `like` has one."""
    linear = nn.Linear(features, outputs, bias=getattr(like, "bias", None) is not None, device="meta")
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, nn.Parameter(0.5 * torch.randn(parameter.shape, generator=random)))
    return linear


def draws_random_numbers(small: nn.Module, x: Tensor) -> bool:
    """Whether `small` does in training, as dropout does; comparing results would not show that of a low rate."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        small(x)
        return not torch.equal(torch.get_rng_state(), before)


def is_equal(
    original: Callable[..., Any], ours: Callable[..., Any], *inputs: Tensor, weights: Sequence[Tensor] = ()
) -> bool:
    """Whether both give the same values, and the same gradients of inputs and weights, in fp32 up to rounding."""
    results = []
    for function in (original, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        given = function(*leaves)
        outputs = given if isinstance(given, tuple) else (given,)
        # Of another seed: the gradient of a norm vanishes along its own input.
        random = seeded(1)
        incoming = [torch.randn(y.shape, generator=random) for y in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *weights], incoming, allow_unused=True)
        results.append((type(given), [*outputs, *gradients]))
    (kind, expected), (our_kind, ours_given) = results
    return kind is our_kind and len(expected) == len(ours_given) and all(map(_is_close, expected, ours_given))


def is_equal_module(small: nn.Module, forward: Callable[..., Any], x: Tensor, *, scales: Sequence[float]) -> bool:
    """Whether `forward` is that of `small`: in training and evaluation, and on input of 2, 3 and 4 dimensions.

    scales: of the input. Large ones show clamps and caps, small ones epsilons.
    """
    weights = list(small.parameters())
    for training, scale in product((True, False), scales):
        small.train(training)
        if not is_equal(small, partial(forward, small), scale * x, weights=weights):
            return False
    small.train()
    for other in (x[0], x[None]):
        try:
            small(other)
        except (RuntimeError, ValueError, IndexError):
            continue  # The family never calls it with such input.
        if not is_equal(small, partial(forward, small), scales[0] * other, weights=weights):
            return False
    return True


def _is_close(expected: Tensor | None, given: Tensor | None) -> bool:
    if expected is None or given is None:
        return expected is given
    if (expected.shape, expected.dtype) != (given.shape, given.dtype):
        return False
    # Sums of some ten products: rounding goes by the largest values, where a factor of 1.0001 shows already.
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return isfinite(largest) and torch.allclose(expected, given, rtol=1e-5, atol=_ROUNDING * largest)
