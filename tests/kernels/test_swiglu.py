"""swiglu and swiglu_packed against PyTorch in the same dtype and in fp64; with them what all activations share."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import swiglu, swiglu_packed
from strata_kernels.ops._launch import recording
from strata_kernels.warmup import record

# What only the host does.
host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Powers of two and not, ragged, wider than a program's block, narrower than a vector.
SHAPES = [(1,), (3, 7), (5, 127), (2, 3, 256), (2, 2304), (7, 1000)]
LARGE = [(64, width) for width in (768, 2304, 2560, 2880, 3584, 5120, 6144, 14336, 18944)] + [(4096, 33), (1, 10**7)]
SHAPES += LARGE * torch.cuda.is_available()


# NumPy's, in the interpreter, which also computes what a compiler leaves out.
numpy_overflows = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def plain(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> Tensor:
    return multiplier * (functional.silu(gate_multiplier * gate) * up)


def plain_packed(x: Tensor) -> Tensor:
    return plain(*x.chunk(2, dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    compare(swiglu, plain, [3 * torch.randn(shape, device=device).to(dtype) for _ in range(2)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    x = 3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(dtype)
    y, dx = compare(swiglu_packed, plain_packed, [x])
    assert y.is_contiguous() and dx.is_contiguous()


def test_packed_with_the_gate_behind(device, compare, poisoned) -> None:
    def swapped(x: Tensor) -> Tensor:
        return plain(*x.chunk(2, dim=-1)[::-1])

    compare(partial(swiglu_packed, gate_first=False), swapped, [torch.randn(3, 40, device=device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multipliers(dtype, device, compare, poisoned) -> None:
    multipliers = {"gate_multiplier": 0.75, "multiplier": 0.3}
    inputs = [3 * torch.randn(5, 72, device=device).to(dtype) for _ in range(2)]
    compare(partial(swiglu, **multipliers), partial(plain, **multipliers), inputs)
    packed = torch.cat(inputs, dim=-1)
    assert torch.equal(swiglu_packed(packed, **multipliers), swiglu(*inputs, **multipliers))


@numpy_overflows
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4])
def test_extreme_values(scale, dtype, device, compare) -> None:
    gate = (scale * torch.randn(64, device=device)).to(dtype)
    compare(swiglu, plain, [gate, torch.randn(64, device=device).to(dtype)])


@numpy_overflows
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
    "the same twice": lambda x: (x, x),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, device, compare, poisoned) -> None:
    compare(swiglu, plain, list(view(torch.randn(3, 5, 64, device=device))))


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x[..., 3:33], lambda x: x[::2, :, ::2]])
def test_packed_strided_inputs(view, device, compare, poisoned) -> None:
    compare(swiglu_packed, plain_packed, [view(torch.randn(3, 5, 64, device=device))])


@host
def test_halves_are_not_copied() -> None:
    with torch.device("meta"), recording() as calls:
        x = torch.empty(2, 3, 96, requires_grad=True)
        swiglu_packed(x).sum().backward()
        swiglu(*x.chunk(2, dim=-1)).sum().backward()
    packed_forward, packed_backward, forward, backward = (call.args for call in calls)
    base = x.untyped_storage()._cdata
    for args, read in ((packed_forward, (0, 1)), (packed_backward, (1, 2)), (forward, (0, 1)), (backward, (1, 2))):
        assert all(args[i].untyped_storage()._cdata == base for i in read)
    assert packed_backward[3].untyped_storage()._cdata == packed_backward[4].untyped_storage()._cdata


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


@pytest.mark.parametrize("shape", [(3, 0), (0, 8)], ids=str)
def test_no_elements(shape, device, poisoned) -> None:
    gate, up = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    swiglu(gate, up).sum().backward()
    swiglu_packed(gate).sum().backward()
    assert gate.grad.shape == up.grad.shape == shape


@host
def test_too_many_elements() -> None:
    x = torch.empty(2**31, 8, dtype=torch.bfloat16, device="meta")
    with recording(), pytest.raises(ValueError, match=r"at most 2\^34 elements at once, got 17179869184"):
        swiglu(x, x)


@host
def test_fp64_is_differentiated_exactly(device) -> None:
    inputs = [torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    function = partial(swiglu, gate_multiplier=0.5, multiplier=2.0)
    assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)
    packed = torch.cat(inputs).detach()[:, :4].requires_grad_()
    for gate_first in (True, False):
        function = partial(swiglu_packed, gate_first=gate_first)
        assert torch.autograd.gradcheck(function, packed) and torch.autograd.gradgradcheck(function, packed)


def test_second_derivatives(device, gradients) -> None:
    """Of a penalty on the gradient, as PyTorch's own operators give it."""

    def penalty(function, gate: Tensor, up: Tensor) -> Tensor:
        y = function(gate, up)
        return sum(d.square().sum() for d in torch.autograd.grad(y.sum(), (gate, up), create_graph=True))

    inputs = list(torch.randn(2, 4, 16, device=device))
    given, expected = (gradients(partial(penalty, function), inputs) for function in (swiglu, plain))
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_vmap(device) -> None:
    gate, up = torch.randn(3, 4, 8, device=device), torch.randn(4, 8, device=device)
    given = torch.func.vmap(swiglu, in_dims=(1, None), out_dims=1)(gate.transpose(0, 1), up)
    torch.testing.assert_close(given.transpose(0, 1), swiglu(gate, up.expand_as(gate)))
    packed = torch.func.vmap(swiglu_packed, in_dims=2, out_dims=0)(gate.movedim(0, 2))
    torch.testing.assert_close(packed, swiglu_packed(gate))


@host
def test_compiled_equals_eager(device, gradients) -> None:
    def function(x: Tensor) -> Tensor:
        return swiglu(*x.chunk(2, dim=-1)).cos() + swiglu_packed(x, gate_multiplier=0.5)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 34, device=device)
    assert all(torch.equal(a, b) for a, b in zip(gradients(function, [x]), gradients(compiled, [x]), strict=True))


@host
def test_another_length_is_compiled_once_more(device) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(swiglu_packed, fullgraph=True, backend=backend)
    for rows in (5, 6, 9, 17):
        x = torch.randn(2, rows, 32, device=device)
        assert torch.equal(compiled(x), swiglu_packed(x))
    assert len(graphs) <= 2


def test_checkpointed_and_under_autocast(device, gradients) -> None:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(swiglu, gate, up, use_reentrant=False)

    inputs = list(torch.randn(2, 3, 24, device=device).bfloat16())
    given, expected = gradients(function, inputs), gradients(swiglu, inputs)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@host
def test_few_kernels_for_many_shapes() -> None:
    """Two per dtype, forward and backward, for every width and number of rows that models have."""

    def step(dtype: torch.dtype) -> None:
        for rows in (1, 7, 512, 8192):
            for width in (768, 2304, 2560, 2880, 3584, 5120, 6144, 14336, 18944):
                x = torch.empty(rows, 2 * width, dtype=dtype, device="meta", requires_grad=True)
                swiglu_packed(x).sum().backward()
                swiglu(*x.chunk(2, dim=-1)).sum().backward()

    assert len(record(partial(step, torch.bfloat16))) == 2


@host
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    gate, up = (torch.randn(4, 6, device=device).t().requires_grad_() for _ in range(2))
    dy = torch.randn(6, 4, device=device)
    torch.library.opcheck(torch.ops.strata.swiglu.default, (gate, up, 1.0, 0.5))
    torch.library.opcheck(torch.ops.strata.swiglu_bwd.default, (dy, gate.data, up.data, 1.0, 0.5))
    torch.library.opcheck(torch.ops.strata.swiglu_packed.default, (gate, False, 1.0, 0.5))
    torch.library.opcheck(torch.ops.strata.swiglu_packed_bwd.default, (dy[:, :2], gate.data, False, 1.0, 0.5))


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


@pytest.mark.parametrize("x", [torch.ones(2, 5), torch.tensor(1.0), X.int()], ids=["odd", "no axis", "int"])
def test_wrong_packed_arguments(x) -> None:
    with pytest.raises(ValueError, match=r"x must be bf16, fp16, fp32, fp64 of shape \[\.\.\., 2 \* D\], got"):
        swiglu_packed(x)
