"""sparsemax against the sorting algorithm of its paper, in the same dtype and in fp64."""

import os

import pytest
import torch
from torch import Tensor

from strata_kernels import sparsemax

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


def plain(z: Tensor) -> Tensor:
    """Algorithm 1 of arXiv:1602.02068."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    ordered = wide.sort(-1, descending=True).values
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=wide.dtype)
    support = (1 + rank * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    # Unlike that of `clamp`, its gradient is 0 at 0: a class on the threshold, as in bf16 one often is, is outside.
    return (wide - tau).relu().to(z.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 300), (2, 5001), (1, 70001)], ids=str)
def test_matches_fp64(shape, scale, dtype, device, compare, poisoned) -> None:
    # Multiples of 1/64: both dtypes then agree on which classes are inside.
    z = (scale * torch.randn(shape) * 64).round() / 64
    compare(sparsemax, plain, [z.to(device, dtype)])


def test_rows_sum_to_one_and_are_sparse(device) -> None:
    y = sparsemax(3 * torch.randn(50, 200, device=device))
    torch.testing.assert_close(y.sum(-1), torch.ones(50, device=device))
    assert (y > 0).sum(-1).float().mean() < 10


def test_logits_far_from_zero_and_masked_ones(device) -> None:
    z = torch.tensor([[1e6, 1e6 - 0.5, 0.0], [-1e6, -1e6, -torch.inf]], device=device)
    expected = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.5, 0.0]], device=device)
    torch.testing.assert_close(sparsemax(z), expected)


def test_a_class_on_the_threshold_is_outside(device) -> None:
    """As the coarse numbers of bf16 often are: (0 + 0 - 1/2 - 1) / 3 = -1/2."""
    z = torch.tensor([[3.0, 3.0, 2.5, 0.0]], device=device, requires_grad=True)
    y = sparsemax(z)
    assert y.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    (gradient,) = torch.autograd.grad(y, z, torch.tensor([[1.0, 0.0, 4.0, 4.0]], device=device))
    assert gradient.tolist() == [[0.5, -0.5, 0.0, 0.0]]


def test_derivatives(device) -> None:
    z = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(sparsemax, z) and torch.autograd.gradgradcheck(sparsemax, z)
    ours, theirs = (torch.func.grad(lambda z, f=f: f(z).square().sum())(z.detach()) for f in (sparsemax, plain))
    torch.testing.assert_close(ours, theirs)


def test_compiled_equals_eager(device, gradients) -> None:
    z = torch.randn(3, 30, device=device)
    function = lambda z: sparsemax(z.sin()).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, [z]), gradients(compiled, [z]), strict=True):
        assert torch.equal(a, b)


def test_no_rows_and_wrong_arguments(device) -> None:
    assert sparsemax(torch.zeros(0, 4, device=device)).shape == (0, 4)
    for z in (torch.zeros(3, 0, device=device), torch.zeros(3, dtype=torch.int64, device=device)):
        with pytest.raises(ValueError, match="V > 0"):
            sparsemax(z)
