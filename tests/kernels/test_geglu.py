"""geglu and geglu_packed against PyTorch in the same dtype and in fp64; what activations share is in test_swiglu.py."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import geglu, geglu_packed

# What only the host does.
host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 7), (2, 2304)] + [(64, 18944), (4096, 33)] * torch.cuda.is_available()

# NumPy's, in the interpreter, which also computes what a compiler leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
both = pytest.mark.parametrize("approximate", ["none", "tanh"])


def plain(gate: Tensor, up: Tensor, approximate: str, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    return multiplier * (functional.gelu(gate_multiplier * gate, approximate=approximate) * up)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, approximate, device, compare, poisoned) -> None:
    functions = (partial(function, approximate=approximate) for function in (geglu, plain))
    compare(*functions, [3 * torch.randn(shape, device=device).to(dtype) for _ in range(2)])


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_over_the_whole_range(dtype, approximate, device, compare) -> None:
    """Where the normal distribution bends, in its tails, and far beyond them."""
    gate = torch.cat([torch.linspace(-9, 9, 4001), torch.logspace(-8, 4, 25), -torch.logspace(-8, 4, 25)])
    up = torch.randn(gate.shape).to(device, dtype)
    functions = (partial(function, approximate=approximate) for function in (geglu, plain))
    compare(*functions, [gate.to(device, dtype), up])


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_tail_keeps_its_digits(dtype, approximate, device) -> None:
    """For negative gates gelu is a small difference of large numbers; there the relative error counts."""
    gate = torch.linspace(-4, -0.5, 64, device=device).to(dtype)
    given, expected = (
        function(x, torch.ones_like(x), approximate) for function, x in ((geglu, gate), (plain, gate.double()))
    )
    torch.testing.assert_close(given.double(), expected, rtol=1e-2, atol=0)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturated_gates(dtype, approximate, device) -> None:
    gate = torch.tensor([-3e38, -1e10, -200.0, 0.0, 200.0, 1e10, float("nan")], device=device).to(dtype)
    gate.requires_grad_()
    y = geglu(gate, torch.ones_like(gate), approximate)
    torch.testing.assert_close(y, gate.detach().relu(), equal_nan=True)
    y.sum().backward()
    # PyTorch's own is NaN at -3e38, where the cube is infinite.
    torch.testing.assert_close(gate.grad[1:6], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=dtype, device=device))


@both
def test_packed(approximate, device, gradients) -> None:
    x = torch.randn(3, 2, 48, device=device)
    multipliers = {"gate_multiplier": 0.75, "multiplier": 0.3}

    def split(x: Tensor, gate_first: bool) -> Tensor:
        return geglu(*x.chunk(2, dim=-1)[:: 1 if gate_first else -1], approximate, **multipliers)

    for gate_first in (True, False):
        packed = partial(geglu_packed, approximate=approximate, gate_first=gate_first, **multipliers)
        for given, expected in zip(
            gradients(packed, [x]), gradients(partial(split, gate_first=gate_first), [x]), strict=True
        ):
            assert torch.equal(given, expected)


@both
def test_multipliers(approximate, device, compare, poisoned) -> None:
    settings = {"approximate": approximate, "gate_multiplier": 0.75, "multiplier": 0.3}
    inputs = [3 * torch.randn(5, 72, device=device) for _ in range(2)]
    compare(partial(geglu, **settings), partial(plain, **settings), inputs)


@host
@both
def test_fp64_is_differentiated_exactly(approximate, device) -> None:
    inputs = [torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    function = partial(geglu, approximate=approximate)
    assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


@host
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
@pytest.mark.parametrize("name", ["geglu", "geglu_tanh"])
def test_is_a_well_formed_operator(name, device) -> None:
    gate, up = (torch.randn(4, 6, device=device).t().requires_grad_() for _ in range(2))
    torch.library.opcheck(getattr(torch.ops.strata, name).default, (gate, up, 1.0, 0.5))
    torch.library.opcheck(getattr(torch.ops.strata, f"{name}_packed").default, (gate, True, 1.0, 0.5))


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: geglu(X, torch.ones(2, 5)), r"got float32 \[2, 4\] and float32 \[2, 5\]"),
        (lambda: geglu(X, X, "erf"), "approximate must be one of none, tanh, got 'erf'"),
        (lambda: geglu_packed(X, "new"), "approximate must be one of none, tanh, got 'new'"),
        (lambda: geglu_packed(X[:, :3]), r"x must be .* of shape \[\.\.\., 2 \* D\], got float32 \[2, 3\]"),
    ],
)
def test_wrong_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
