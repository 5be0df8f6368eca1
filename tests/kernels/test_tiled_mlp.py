"""tiled_mlp against the layer that takes all rows at once, in the same dtype and in fp64."""

import os
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strata_kernels import tiled_mlp

DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def plain(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    return functional.linear(ACTIVATIONS[activation](functional.linear(x, gate)) * functional.linear(x, up), down)


def layer(*shape: int, inner: int = 24, features: int = 10) -> list[Tensor]:
    """x and the weights of gate, up and down."""
    width = shape[-1]
    gate, up = (torch.randn(inner, width) * width**-0.5 for _ in range(2))
    return [torch.randn(shape), gate, up, torch.randn(features, inner) * inner**-0.5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [1, 7, 16, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_fp64(activation, tile, dtype, device, within_bar, gradients, poisoned) -> None:
    inputs = [t.to(device, dtype) for t in layer(3, 11, 16)]
    ours = partial(tiled_mlp, activation=activation, tile=tile)
    theirs = partial(plain, activation=activation)
    results = gradients(ours, inputs), gradients(theirs, inputs), gradients(theirs, [t.double() for t in inputs])
    for each in zip(*results, strict=True):
        # h and the gradients of g and u are rounded between products, and so are their own inputs.
        within_bar(*each, roundings=3)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the sums are PyTorch's")
def test_gradients_of_weights_are_rounded_once(device, gradients) -> None:
    """Summed in bf16, many tiles would lose what a large sum rounds away."""
    inputs = [t.to(device, torch.bfloat16) for t in layer(2048, 16)]
    exact = gradients(plain, [t.double() for t in inputs])[2:]
    few, many = (gradients(partial(tiled_mlp, tile=tile), inputs)[2:] for tile in (2048, 16))
    for a, b, truth in zip(few, many, exact, strict=True):
        errors = [float((x - truth).norm() / truth.norm()) for x in (a, b)]
        assert errors[1] < 1.2 * errors[0]


class _Largest(TorchDispatchMode):
    """The most elements of tensors [*, inner] that were alive at once, without the weights."""

    def __init__(self, inner: int, weights: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.weights, self.alive, self.most = inner, {id(w) for w in weights}, {}, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == self.inner and t.shape[0] < 400:
                self.alive[id(t)] = t.numel()
                weakref.finalize(t, self.alive.pop, id(t), None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


def test_activations_do_not_grow_with_the_rows(device) -> None:
    most = []
    for rows in (64, 256):
        inputs = [t.to(device).requires_grad_() for t in layer(rows, 16, inner=500)]
        with _Largest(500, inputs) as found:
            y = tiled_mlp(*inputs, tile=32)
            assert {t.data_ptr() for t in y.grad_fn.saved_tensors} == {t.data_ptr() for t in inputs}
            y.sum().backward()
        most.append(found.most)
        # g, u, h, their gradients, and what one step computes of the others.
        assert 0 < found.most <= 9 * 32 * 500
    assert most[0] == most[1]


def test_frozen_weights_get_no_gradients(device) -> None:
    x, *weights = (t.to(device) for t in layer(9, 16))
    found, expected = (
        torch.autograd.grad(f(x.requires_grad_(), *weights).sum(), x)[0] for f in (partial(tiled_mlp, tile=4), plain)
    )
    torch.testing.assert_close(found, expected)
    weights[1].requires_grad_()
    (found,) = torch.autograd.grad(tiled_mlp(x.detach(), *weights, tile=4).sum(), weights[1])
    (expected,) = torch.autograd.grad(plain(x.detach(), *weights).sum(), weights[1])
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter's bf16 products are wrong")
def test_autocast(device) -> None:
    inputs = [t.to(device) for t in layer(9, 16)]
    with torch.autocast(device.type, torch.bfloat16):
        found, expected = tiled_mlp(*inputs, tile=4), plain(*inputs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_compiled_equals_eager(device, gradients) -> None:
    inputs = [t.to(device) for t in layer(9, 16)]
    function = lambda x, *rest: tiled_mlp(x.sin(), *rest, tile=4).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, inputs), gradients(compiled, inputs), strict=True):
        assert torch.equal(a, b)


def test_derivatives(device) -> None:
    inputs = [t.to(device, torch.float64).requires_grad_() for t in layer(5, 3, inner=4, features=2)]
    ours = partial(tiled_mlp, tile=2)
    assert torch.autograd.gradcheck(ours, inputs) and torch.autograd.gradgradcheck(ours, inputs)
    found = [
        torch.func.grad(lambda x, f=f: f(x, *inputs[1:]).square().sum())(inputs[0].detach()) for f in (ours, plain)
    ]
    torch.testing.assert_close(*found)


def test_no_rows_and_wrong_arguments(device) -> None:
    x, gate, up, down = (t.to(device).requires_grad_() for t in layer(5, 16))
    y = tiled_mlp(x[:0], gate, up, down)
    assert y.shape == (0, 10) and not any(g.any() for g in torch.autograd.grad(y.sum(), (gate, up, down)))
    for arguments, options, message in (
        ((x, gate, up[:3], down), {}, r"\[I, H\] and \[H', I\]"),
        ((x, gate, up, down.t()), {}, r"\[I, H\] and \[H', I\]"),
        ((x, gate, up, down.double()), {}, "one dtype of bf16"),
        ((x, gate, up, down.to("meta")), {}, "on one device"),
        ((x, gate, up, down), {"activation": "relu"}, "one of silu, gelu, gelu_tanh, got 'relu'"),
        ((x, gate, up, down), {"tile": 0}, "tile 0 must be at least one row"),
    ):
        with pytest.raises(ValueError, match=message):
            tiled_mlp(*arguments, **options)
