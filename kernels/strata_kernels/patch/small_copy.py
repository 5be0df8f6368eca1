"""Small copies of a model's modules, with their class's code, and their comparison with an operator."""

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
# Tolerance in fp32, relative to the largest value.
_ROUNDING = 5e-6

# Attributes of every module.
INTERNALS = frozenset(vars(nn.Module()))


class NotEqual(Exception):
    """A module is not equal to an operator; the message is the reason."""


def seeded(seed: int = 0) -> torch.Generator:
    """A seeded generator, independent of the global random state."""
    return torch.Generator("cpu").manual_seed(seed)


def takes_one_tensor(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` has exactly one parameter, which may be positional."""
    kinds = [parameter.kind for parameter in inspect.signature(cls.forward).parameters.values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(kinds) == 2 and kinds[1] in by_position


def copy_of(module: nn.Module, sizes: dict[int, int]) -> Any:
    """An instance of the module's class with its attributes, without children and weights.

    sizes: real size → size in the copy, replaced in attributes.
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
    """Whether `small` consumes random numbers in training (dropout); a low rate may not change the results."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        small(x)
        return not torch.equal(torch.get_rng_state(), before)


def is_equal(
    original: Callable[..., Any], ours: Callable[..., Any], *inputs: Tensor, weights: Sequence[Tensor] = ()
) -> bool:
    """Whether values, and gradients of inputs and weights, are equal up to fp32 rounding."""
    results = []
    for function in (original, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        given = function(*leaves)
        outputs = given if isinstance(given, tuple) else (given,)
        # Another seed than the input's: a norm's gradient vanishes along its input.
        random = seeded(1)
        incoming = [torch.randn(y.shape, generator=random) for y in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, *weights], incoming, allow_unused=True)
        results.append((type(given), [*outputs, *gradients]))
    (kind, expected), (our_kind, ours_given) = results
    return kind is our_kind and len(expected) == len(ours_given) and all(map(_is_close, expected, ours_given))


def is_equal_module(small: nn.Module, forward: Callable[..., Any], x: Tensor, *, scales: Sequence[float]) -> bool:
    """Whether `forward` equals that of `small`, in training and evaluation mode, on 2-d, 3-d and 4-d input.

    scales: input scales. Large ones reveal clamps and softcaps, small ones epsilons.
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
            continue  # The family's code does not support this input.
        if not is_equal(small, partial(forward, small), scales[0] * other, weights=weights):
            return False
    return True


def _is_close(expected: Tensor | None, given: Tensor | None) -> bool:
    if expected is None or given is None:
        return expected is given
    if (expected.shape, expected.dtype) != (given.shape, given.dtype):
        return False
    # Rounding errors of short sums are relative to the largest values; this still detects a factor of 1.0001.
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return isfinite(largest) and torch.allclose(expected, given, rtol=1e-5, atol=_ROUNDING * largest)
