"""softmax against PyTorch in the same dtype and in fp64."""

import os

import pytest
import torch

from strata_kernels import softmax

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


def plain(z: torch.Tensor) -> torch.Tensor:
    return torch.softmax(z, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
# Several rows a program, one, and rows that are walked over in parts.
@pytest.mark.parametrize("shape", [(1, 1), (50, 7), (2, 3, 300), (2, 5001), (3, 70001)], ids=str)
def test_matches_fp64(shape, scale, dtype, device, within_bar, poisoned) -> None:
    z = (scale * torch.randn(shape)).to(device, dtype)
    incoming = torch.randn(shape).bfloat16().to(device, dtype)
    results, gradients = [], []
    for function, given in ((softmax, z), (plain, z), (plain, z.double())):
        leaf = given.clone().requires_grad_()
        y = function(leaf)
        results.append(y.detach())
        gradients += torch.autograd.grad(y, leaf, incoming.to(y.dtype))
    within_bar(*results)
    # As PyTorch's, of the rounded result: y dy - y Σ y dy, which may be far less than its terms.
    largest = (results[1] * incoming).abs().max()
    within_bar(*(torch.cat([dz.flatten(), largest.to(dz).view(1)]) for dz in gradients), roundings=2)


@pytest.mark.parametrize("width", [8, 70000])
def test_masked_logits_and_rows_without_any(width, device) -> None:
    z = torch.full((3, width), -torch.inf, device=device)
    # The only logits lie behind the first part of a wide row.
    z[0, -3:] = torch.tensor([1e6, 1e6 - 1, -torch.inf], device=device)
    z[1, 1] = -2.0
    found, expected = softmax(z), torch.softmax(z, -1)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[2].isnan().all() and found[1, 1] == 1


def test_derivatives(device) -> None:
    z = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, z) and torch.autograd.gradgradcheck(softmax, z)
    ours, theirs = (torch.func.grad(lambda z, f=f: f(z).square().sum())(z.detach()) for f in (softmax, plain))
    torch.testing.assert_close(ours, theirs)


def test_compiled_equals_eager(device, gradients) -> None:
    z = torch.randn(3, 30, device=device)
    function = lambda z: softmax(z.sin()).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, [z]), gradients(compiled, [z]), strict=True):
        assert torch.equal(a, b)


def test_no_rows_and_wrong_arguments(device) -> None:
    assert softmax(torch.zeros(0, 4, device=device)).shape == (0, 4)
    for z in (torch.zeros(3, 0, device=device), torch.zeros(3, dtype=torch.int64, device=device)):
        with pytest.raises(ValueError, match="V > 0"):
            softmax(z)
