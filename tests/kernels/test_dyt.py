"""dyt against PyTorch in the same dtype and in fp64."""

import os

import pytest
import torch
from torch import Tensor

from strata_kernels import dyt

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


def plain(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = weight * torch.tanh(alpha * x)
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 33), (50, 300), (3, 2500)], ids=str)
def test_matches_fp64(shape, scale, with_bias, dtype, device, compare, poisoned) -> None:
    inputs = [scale * torch.randn(shape), torch.tensor([0.7]), torch.randn(shape[-1]), torch.randn(shape[-1])]
    compare(dyt, plain, [t.to(device, dtype) for t in inputs[: 3 + with_bias]])


def test_compiled_equals_eager_and_runs_repeat(device, gradients) -> None:
    inputs = [t.to(device) for t in (torch.randn(9, 30), torch.tensor(0.7), torch.randn(30), torch.randn(30))]
    function = lambda x, *rest: dyt(x.sin(), *rest).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [gradients(f, inputs) for f in (function, function, compiled)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_derivatives(device) -> None:
    shapes = ((4, 6), (1,), (6,), (6,))
    inputs = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(dyt, inputs)
    found = [torch.func.grad(lambda x, f=f: f(x, *inputs[1:]).square().sum())(inputs[0].detach()) for f in (dyt, plain)]
    torch.testing.assert_close(*found)
    with pytest.raises(NotImplementedError, match="only once"):
        torch.autograd.grad(dyt(*inputs).sum(), inputs[0], create_graph=True)


def test_no_rows_and_wrong_arguments(device) -> None:
    one, ones = torch.ones(1, device=device), torch.ones(4, device=device, requires_grad=True)
    y = dyt(torch.zeros(0, 4, device=device), one, ones)
    assert y.shape == (0, 4) and not torch.autograd.grad(y.sum(), ones)[0].any()
    x = torch.zeros(3, 4, device=device)
    for arguments, message in (
        ((x, ones, ones), "one element"),
        ((x, one, ones[:3]), r"and \[D\]"),
        ((x, one, ones, ones.double()), "must have the shape and dtype of weight"),
        ((x.long(), one, ones), "must be bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            dyt(*arguments)
