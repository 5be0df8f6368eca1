"""modulated_rms_norm and modulated_layer_norm against PyTorch in the same dtype and in fp64."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import modulated_layer_norm, modulated_rms_norm

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


def broadcast(modulation: Tensor, x: Tensor) -> Tensor:
    return modulation[:, None] if modulation.dim() == 2 and x.dim() == 3 else modulation


def rms(x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    y = functional.rms_norm(x, x.shape[-1:], None if weight is None else 1 + weight, 1e-6) * (1 + broadcast(scale, x))
    return y if shift is None else y + broadcast(shift, x)


def layer(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    return y * (1 + broadcast(scale, x)) + broadcast(shift, x)


# x, and scale and shift: for all rows, of each element of the batch, with an axis of 1, of each row.
SHAPES = [
    ((7, 33), (33,)), ((3, 5, 300), (3, 300)), ((2, 50, 64), (2, 1, 64)), ((2, 3, 40), (2, 3, 40)),
    ((2, 9, 2500), (2, 2500)), ((2, 3, 4, 16), (2, 3, 1, 16)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "modulation"), SHAPES, ids=str)
def test_layer_norm_matches_fp64(shape, modulation, dtype, device, compare, poisoned) -> None:
    inputs = [2 + torch.randn(shape), *(torch.randn(modulation) for _ in range(2)), *torch.randn(2, shape[-1])]
    compare(modulated_layer_norm, layer, [t.to(device, dtype) for t in inputs])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize(("shape", "modulation"), SHAPES, ids=str)
def test_rms_norm_matches_fp64(shape, modulation, with_weight, dtype, device, compare, poisoned) -> None:
    inputs = [torch.randn(shape), *(torch.randn(modulation) for _ in range(2)), torch.randn(shape[-1])]
    ours = lambda x, s, t, w=None: modulated_rms_norm(x, s, t, w, offset=1.0)  # noqa: E731
    compare(ours, rms, [t.to(device, dtype) for t in inputs[: 3 + with_weight]])


@pytest.mark.parametrize("modulation", [(2, 40), (2, 3, 40)], ids=str)
def test_without_shift(modulation, device, compare) -> None:
    inputs = [torch.randn(2, 3, 40, device=device), torch.randn(modulation, device=device)]
    compare(modulated_rms_norm, rms, inputs)


def test_parts_of_one_projection_in_fp32(device) -> None:
    """As DiT gives them: chunks of the rows of one product, often in fp32 beside bf16."""
    both = torch.randn(3, 2 * 24, device=device, requires_grad=True)
    x = torch.randn(3, 5, 24, device=device).bfloat16()
    y = modulated_layer_norm(x, *both.chunk(2, dim=1))
    plain = functional.layer_norm(x.float(), (24,), eps=1e-6) * (1 + both[:, None, :24]) + both[:, None, 24:]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain, rtol=2**-7, atol=1e-2)
    weights = torch.randn(y.shape, device=device)
    found, expected = (torch.autograd.grad((t.float() * weights).sum(), both)[0] for t in (y, plain))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def test_compiled_equals_eager_and_runs_repeat(device, gradients) -> None:
    inputs = [t.to(device) for t in (torch.randn(2, 9, 30), torch.randn(2, 30), torch.randn(2, 30), torch.randn(30))]
    function = lambda x, *rest: modulated_rms_norm(x.sin(), *rest).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [gradients(f, inputs) for f in (function, function, compiled)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


@pytest.mark.parametrize("modulation", [(2, 6), (2, 3, 6)], ids=str)
def test_derivatives(modulation, device) -> None:
    shapes = ((2, 3, 6), modulation, modulation, (6,), (6,))
    inputs = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(modulated_layer_norm, inputs)
    assert torch.autograd.gradgradcheck(modulated_layer_norm, inputs)
    found = [
        torch.func.grad(lambda x, f=f: f(x, *inputs[1:]).square().sum())(inputs[0].detach())
        for f in (modulated_layer_norm, layer)
    ]
    torch.testing.assert_close(*found)


def test_no_rows_and_wrong_arguments(device) -> None:
    scale, weight = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device, requires_grad=True)
    y = modulated_rms_norm(torch.zeros(0, 4, device=device), scale, None, weight)
    assert y.shape == (0, 4)
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (scale, weight)))
    x = torch.zeros(2, 3, 4, device=device)
    for arguments, message in (
        ((x, torch.ones(3, 4, device=device)), "with leading axes of x"),
        ((x, torch.ones(1, 3, 4, device=device)), "with leading axes of x"),
        ((x, torch.ones(3, device=device)), "and 4 features"),
        ((x, scale, scale[None]), "have the shape of scale"),
        ((x, scale, None, scale[:3]), r"weight must be .* of shape \[4\]"),
        ((x, scale.to("meta")), "a tensor is on meta"),
        ((x.long(), scale), "x must be"),
    ):
        with pytest.raises(ValueError, match=message):
            modulated_rms_norm(*arguments)
