"""swiglu against PyTorch in the same dtype and in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def plain(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (5, 127), (2, 3, 256), (2, 2304), (7, 1000)], ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    compare(swiglu, plain, [3 * torch.randn(shape, device=device).to(dtype) for _ in range(2)])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4])
def test_extreme_values(scale, dtype, device, compare) -> None:
    gate = (scale * torch.randn(64, device=device)).to(dtype)
    compare(swiglu, plain, [gate, torch.randn(64, device=device).to(dtype)])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturated_gates(dtype, device) -> None:
    gate = torch.tensor([-3e38, -1e10, -200.0, 0.0, 200.0, 1e10, float("nan"), float("inf")], device=device).to(dtype)
    y = swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(y, plain(gate, torch.ones_like(gate)), equal_nan=True)


STRIDED = {
    "halves of one projection": lambda x: x.chunk(2, dim=-1),
    "transposed": lambda x: x.transpose(0, 1).chunk(2, dim=-1),
    "every other feature": lambda x: (x[..., ::2], x[..., 1::2]),
    "one of two": lambda x: (x[..., :10], x[..., 10:20].contiguous()),
    "unaligned": lambda x: (x[..., 1:17], x[..., 2:18]),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, device, compare, poisoned) -> None:
    compare(swiglu, plain, list(view(torch.randn(3, 5, 64, device=device))))


def test_rows_far_apart(far, gradients) -> None:
    x, other = far(3, 48), torch.randn(3, 48).bfloat16()
    other = other.to(x.device)
    for i in range(2):
        given, dense = (gradients(swiglu, [y, other][:: 1 - 2 * i]) for y in (x, x.clone()))
        assert all(torch.equal(a, b) for a, b in zip(given, dense, strict=True))


def test_strided_gradients(device) -> None:
    gate, up = torch.randn(2, 6, 32, device=device)
    gate.requires_grad_()
    dy = torch.randn(32, 6, device=device).t()
    given, copied = (torch.autograd.grad(swiglu(gate, up), gate, d)[0] for d in (dy, dy.contiguous()))
    torch.testing.assert_close(given, copied)


def test_no_elements(device, poisoned) -> None:
    gate, up = (torch.randn(3, 0, device=device, requires_grad=True) for _ in range(2))
    swiglu(gate, up).sum().backward()
    assert gate.grad.shape == up.grad.shape == (3, 0)


def test_fp64_is_differentiated_exactly(device) -> None:
    inputs = [torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(swiglu, inputs)


def test_compiled_equals_eager(device, gradients) -> None:
    def function(x: Tensor) -> Tensor:
        return swiglu(*x.chunk(2, dim=-1)).cos()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 34, device=device)
    assert all(torch.equal(a, b) for a, b in zip(gradients(function, [x]), gradients(compiled, [x]), strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    gate, up = (torch.randn(4, 6, device=device).t().requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.strata.swiglu.default, (gate, up))
    torch.library.opcheck(torch.ops.strata.swiglu_bwd.default, (torch.randn(6, 4, device=device), gate.data, up.data))


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (X, torch.ones(2, 5), r"got float32 \[2, 4\] and float32 \[2, 5\]"),
        (X, X.double(), "float32 .* float64"),
        (X.int(), X.int(), "one dtype of bf16, fp16, fp32, fp64, got int32"),
        (X, X.to("meta"), "gate is on cpu and up on meta"),
    ],
)
def test_wrong_arguments(gate, up, message) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(gate, up)
