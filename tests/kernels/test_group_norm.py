"""group_norm against torch.nn.functional.group_norm in the same dtype and in fp64."""

import os

import pytest
import torch
from torch.nn import functional

from strata_kernels import group_norm

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]


# Short channels, of which a program sums several; a group in parts; a channel in parts, of which the last has 3.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [2, 1, 0])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 3), 1), ((2, 6, 5), 3), ((3, 8, 4, 9), 8), ((1, 4, 111, 163), 2), ((2, 2, 16387), 2), ((1, 2, 40003), 1)],
    ids=str,
)
def test_matches_fp64(shape, groups, affine, dtype, device, compare, poisoned) -> None:
    inputs = [3 + torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])][: 1 + affine]
    ours, theirs = (
        lambda x, w=None, b=None: group_norm(x, groups, w, b),
        lambda x, w=None, b=None: functional.group_norm(x, groups, w, b),
    )
    compare(ours, theirs, [t.to(device, dtype) for t in inputs])


def test_a_mean_far_from_zero_costs_no_digits(device) -> None:
    """As that of pixels: the variance as a difference of squares would be noise."""
    x = (1000 + torch.randn(1, 2, 50000)).to(device)
    exact = functional.group_norm(x.double(), 1)
    assert (group_norm(x, 1) - exact).abs().max() < 1e-3


def test_a_layout_of_its_own_and_weights_of_another_dtype(device, within_bar) -> None:
    x = torch.randn(2, 6, 4, 5, device=device).to(memory_format=torch.channels_last)
    weight = torch.randn(6, device=device).bfloat16()
    found = group_norm(x, 3, weight)
    assert found.is_contiguous()
    plain = functional.group_norm(x, 3, weight.float())
    within_bar(found, plain, functional.group_norm(x.double(), 3, weight.double()))


def test_compiled_equals_eager_and_runs_repeat(device, gradients) -> None:
    inputs = [t.to(device) for t in (torch.randn(2, 4, 30), torch.randn(4), torch.randn(4))]
    function = lambda x, *rest: group_norm(x.sin(), 2, *rest).cos()  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [gradients(f, inputs) for f in (function, function, compiled)]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_derivatives(device) -> None:
    inputs = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((2, 4, 3), (4,), (4,))]
    ours = lambda x, w, b: group_norm(x, 2, w, b)  # noqa: E731
    assert torch.autograd.gradcheck(ours, inputs) and torch.autograd.gradgradcheck(ours, inputs)
    found = torch.func.grad(lambda x: ours(x, *inputs[1:]).square().sum())(inputs[0].detach())
    (expected,) = torch.autograd.grad(functional.group_norm(inputs[0], 2, *inputs[1:]).square().sum(), inputs[0])
    torch.testing.assert_close(found, expected)


def test_no_rows_and_wrong_arguments(device) -> None:
    x, weight = torch.zeros(3, 4, 2, device=device), torch.ones(4, device=device, requires_grad=True)
    y = group_norm(x[:0], 2, weight)
    assert y.shape == (0, 4, 2) and not torch.autograd.grad(y.sum(), weight)[0].any()
    for arguments, message in (
        ((x, 3), "must divide the 4 channels"),
        ((x, 0), "must divide"),
        ((x, 2, weight[:3]), r"weight must be .* of shape \[4\]"),
        ((x, 2, weight, weight.long()), "bias must be"),
        ((x[:, :, :0], 2), "with elements"),
        ((x.long(), 2), "x must be"),
    ):
        with pytest.raises(ValueError, match=message):
            group_norm(*arguments)
