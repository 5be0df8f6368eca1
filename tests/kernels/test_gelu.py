"""gelu and silu against PyTorch in the same dtype and in fp64; what activations share is in test_swiglu.py."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import gelu, silu

# What only the host does.
host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (3, 7), (2, 2304)] + [(64, 18944), (4096, 33)] * torch.cuda.is_available()

# NumPy's, in the interpreter, which also computes what a compiler leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def quick_gelu(x: Tensor) -> Tensor:
    """As transformers writes it."""
    return x * torch.sigmoid(1.702 * x)


# Name of the operator → ours, and PyTorch's.
FUNCTIONS = {
    "gelu": (gelu, functional.gelu),
    "gelu_tanh": tuple(partial(function, approximate="tanh") for function in (gelu, functional.gelu)),
    "quick_gelu": (partial(gelu, approximate="sigmoid"), quick_gelu),
    "silu": (silu, functional.silu),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, name, device, compare, poisoned) -> None:
    compare(*FUNCTIONS[name], [3 * torch.randn(shape, device=device).to(dtype)])


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_over_the_whole_range(dtype, name, device, compare) -> None:
    x = torch.cat([torch.linspace(-9, 9, 4001), torch.logspace(-8, 4, 25), -torch.logspace(-8, 4, 25)])
    compare(*FUNCTIONS[name], [x.to(device, dtype)])


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_tail_keeps_its_digits(dtype, name, device) -> None:
    ours, plain = FUNCTIONS[name]
    x = torch.linspace(-4, -0.5, 64, device=device).to(dtype)
    torch.testing.assert_close(ours(x).double(), plain(x.double()), rtol=2e-2, atol=0)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturated(dtype, name, device) -> None:
    # Twice as much is infinite in PyTorch itself on CPUs with AVX-512.
    x = torch.tensor([-1e38, -1e10, -200.0, 0.0, 200.0, 1e10, 1e38, float("nan")], device=device).to(dtype)
    x.requires_grad_()
    y = FUNCTIONS[name][0](x)
    torch.testing.assert_close(y, x.detach().relu(), equal_nan=True)
    y.sum().backward()
    # PyTorch's own is NaN at 1e38, where the cube is infinite.
    torch.testing.assert_close(x.grad[1:6], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=dtype, device=device))


@each
def test_strided_input(name, device, compare, poisoned) -> None:
    compare(*FUNCTIONS[name], [torch.randn(3, 5, 64, device=device)[..., 3:33].transpose(0, 1)])


@host
@each
def test_fp64_is_differentiated_exactly(name, device) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    ours, _ = FUNCTIONS[name]
    assert torch.autograd.gradcheck(ours, x) and torch.autograd.gradgradcheck(ours, x)


@host
@each
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(name, device) -> None:
    x = torch.randn(4, 6, device=device).t().requires_grad_()
    forward, backward = (getattr(torch.ops.strata, kind).default for kind in (name, f"{name}_bwd"))
    torch.library.opcheck(forward, (x,))
    torch.library.opcheck(backward, (torch.randn(6, 4, device=device), x.data))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gelu(torch.tensor(1.0)), r"x must be bf16, fp16, fp32, fp64 of shape \[\.\.\., D\], got"),
        (lambda: silu(torch.ones(3).int()), r"x must be bf16, fp16, fp32, fp64 of shape \[\.\.\., D\], got"),
        (lambda: gelu(torch.ones(3), "erf"), "approximate must be one of none, tanh, sigmoid, got 'erf'"),
    ],
    ids=["no axis", "int", "approximation"],
)
def test_wrong_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
