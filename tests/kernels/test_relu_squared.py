"""relu_squared against PyTorch in the same dtype and in fp64; what activations share is in test_swiglu.py."""

import os

import pytest
import torch
from torch import Tensor

from strata_kernels import relu_squared

# What only the host does.
host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1,), (3, 7), (2, 2304)] + [(64, 18944), (4096, 33)] * torch.cuda.is_available()


def plain(x: Tensor) -> Tensor:
    return torch.relu(x).square()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    compare(relu_squared, plain, [3 * torch.randn(shape, device=device).to(dtype)])


def test_strided_input(device, compare, poisoned) -> None:
    compare(relu_squared, plain, [torch.randn(3, 5, 64, device=device)[..., 3:33].transpose(0, 1)])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite(dtype, device) -> None:
    x = torch.tensor([-float("inf"), -1.0, 0.0, 6e4, float("inf"), float("nan")], device=device).to(dtype)
    torch.testing.assert_close(relu_squared(x), plain(x), equal_nan=True)


def test_no_elements(device, poisoned) -> None:
    x = torch.randn(0, 8, device=device, requires_grad=True)
    relu_squared(x).sum().backward()
    assert x.grad.shape == (0, 8)


@host
def test_fp64_is_differentiated_exactly(device) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(relu_squared, x) and torch.autograd.gradgradcheck(relu_squared, x)


@host
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    x = torch.randn(4, 6, device=device).t().requires_grad_()
    torch.library.opcheck(torch.ops.strata.relu_squared.default, (x,))
    torch.library.opcheck(torch.ops.strata.relu_squared_bwd.default, (torch.randn(6, 4, device=device), x.data))


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(3).int()], ids=["no axis", "int"])
def test_wrong_arguments(x) -> None:
    with pytest.raises(ValueError, match=r"x must be bf16, fp16, fp32, fp64 of shape \[\.\.\., D\], got"):
        relu_squared(x)
