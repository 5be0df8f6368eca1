"""poly_norm against PyTorch in the same dtype and in fp64."""

import os

import pytest
import torch
from torch import Tensor

from strata_kernels import poly_norm

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PolyCom's lines, with the powers in fp32 as those of 16 bits overflow."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))

    def norm(u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)

    return (weight[0] * norm(wide**3) + weight[1] * norm(wide**2) + weight[2] * norm(wide) + bias).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 33), (50, 300), (3, 5000), (1, 70001)], ids=str)
def test_matches_fp64(shape, scale, dtype, device, compare, poisoned) -> None:
    inputs = [scale * torch.randn(shape), torch.randn(3), torch.randn(())]
    compare(poly_norm, plain, [t.to(device, dtype) for t in inputs])


def test_compiled_equals_eager_and_runs_repeat(device, gradients) -> None:
    inputs = [t.to(device) for t in (torch.randn(9, 30), torch.randn(3), torch.randn(1))]
    function = lambda x, *rest: poly_norm(x.sin(), *rest).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [gradients(f, inputs) for f in (function, function, compiled)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_derivatives(device) -> None:
    inputs = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((4, 6), (3,), (1,))]
    assert torch.autograd.gradcheck(poly_norm, inputs) and torch.autograd.gradgradcheck(poly_norm, inputs)
    found = [
        torch.func.grad(lambda x, f=f: f(x, *inputs[1:]).square().sum())(inputs[0].detach()) for f in (poly_norm, plain)
    ]
    torch.testing.assert_close(*found)


def test_no_rows_and_wrong_arguments(device) -> None:
    three, one = torch.ones(3, device=device, requires_grad=True), torch.ones(1, device=device)
    y = poly_norm(torch.zeros(0, 4, device=device), three, one)
    assert y.shape == (0, 4) and not torch.autograd.grad(y.sum(), three)[0].any()
    x = torch.zeros(3, 4, device=device)
    for arguments, message in (
        ((x, three[:2], one), r"\[3\], one element"),
        ((x, three, three), r"\[3\], one element"),
        ((x.long(), three, one), "must be bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            poly_norm(*arguments)
