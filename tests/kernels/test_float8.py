"""Linear layers in FP8 against torchao's, which are emulated on CPUs: the same bits of casts, the same gradients."""

import dataclasses
import gc
import os
import threading
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional
from triton import knobs

from strata_kernels import swiglu, swiglu_packed
from strata_kernels.ops.float8 import cast as casts
from strata_kernels.ops.float8 import linear as linears
from strata_kernels.ops.float8.cast import E4M3, E5M2, cast, inverse_of, transpose
from strata_kernels.ops.float8.largest import finding_largest, largest_of
from strata_kernels.ops.float8.linear import float8_linear, float8_stored_linear, quantize_weight

host = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="has been tested without the interpreter")
torchao = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
SCALINGS = ["tensorwise", "rowwise"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch) -> None:
    """Triton's interpreter rounds to FP8 wrongly where a mantissa overflows; PyTorch's conversion takes its place."""
    if "TRITON_INTERPRET" not in os.environ:
        return
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle

    formats = {"fp8e4nv": E4M3, "fp8e5": E5M2}
    plain = interpreter.InterpreterBuilder.cast_impl

    def convert(builder, source, kind):
        if kind.scalar.name not in formats or source.dtype.scalar.name != "fp32":
            return plain(builder, source, kind)
        values = torch.tensor(source.data).to(formats[kind.scalar.name]).view(torch.uint8).numpy()
        return TensorHandle(values, kind.scalar)

    for name in ("cast_impl", "create_fp_trunc", "create_fp_to_fp"):
        if hasattr(interpreter.InterpreterBuilder, name):
            monkeypatch.setattr(
                interpreter.InterpreterBuilder, name, lambda builder, source, kind, *_: convert(builder, source, kind)
            )


def torchao_cast(x, scaling, axis, dtype):
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    rowwise = scaling == "rowwise"
    found = hp_tensor_to_float8_dynamic(
        x,
        dtype,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE,
        axiswise_dim=axis if rowwise else None,
        round_scales_to_power_of_2=rowwise,
    )
    return found._data.float(), found._scale


@torchao
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (130, 272)], ids=str)
def test_a_cast_has_torchaos_bits_both_ways(shape, scaling, dtype, device, poisoned) -> None:
    pytest.importorskip("torchao")
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(device, dtype)
    for e5m2 in [False] + [True] * (scaling == "tensorwise"):
        found = cast(x, scaling, rows=True, columns=True, e5m2=e5m2)
        rows, row_scale = torchao_cast(x, scaling, -1, E5M2 if e5m2 else E4M3)
        columns, column_scale = torchao_cast(x, scaling, 0, E5M2 if e5m2 else E4M3)
        assert torch.equal(found.rows.float(), rows)
        assert torch.equal(found.transposed[:, : shape[0]].float(), columns.t())
        assert not found.transposed[:, shape[0] :].float().any()
        assert torch.equal(found.row_inverse.flatten(), row_scale.reciprocal().flatten())
        assert torch.equal(found.column_inverse.flatten(), column_scale.reciprocal().flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(20, 32), (130, 272), (384, 512)], ids=str)
def test_kernels_have_the_bits_of_plain_pytorch(shape, scaling, dtype, path, device, poisoned, monkeypatch) -> None:
    if path == "reference":
        pytest.skip("both sides are plain PyTorch")
    x = torch.randn(shape).to(dtype)
    for rows, columns, e5m2 in product((True, False), (True, False), {False, scaling == "tensorwise"}):
        found = cast(x.to(device), scaling, rows=rows, columns=columns, e5m2=e5m2)
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, "interpret", False)
            expected = cast(x, scaling, rows=rows, columns=columns, e5m2=e5m2)
        for name in ("rows", "transposed", "row_inverse", "column_inverse"):
            assert torch.equal(getattr(found, name).float().cpu(), getattr(expected, name).float()), name


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_direction_is_that_of_both(scaling, device, poisoned) -> None:
    x = torch.randn(20, 32, device=device)
    both = cast(x, scaling, rows=True, columns=True)
    rows, columns = (cast(x, scaling, rows=one, columns=not one) for one in (True, False))
    assert torch.equal(rows.rows.float(), both.rows.float()) and torch.equal(rows.row_inverse, both.row_inverse)
    assert torch.equal(columns.transposed.float(), both.transposed.float())
    assert torch.equal(columns.column_inverse, both.column_inverse)
    assert rows.transposed.numel() == columns.rows.numel() == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_seen_in_the_result(value, scaling, device) -> None:
    x = torch.randn(3, 32, device=device)
    x[1, 5] = value
    y = float8_linear(x, torch.randn(16, 32, device=device), scaling=scaling)
    assert y[1].isnan().all()
    assert y.isnan().all() == (scaling == "tensorwise")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros(scaling, device) -> None:
    x, w = torch.zeros(3, 32, device=device), torch.randn(16, 32, device=device)
    assert not float8_linear(x, w, scaling=scaling).any()


def test_the_rows_of_a_matrix_are_cast_apart_with_the_scale_of_all(device) -> None:
    w = torch.randn(48, 32, device=device).bfloat16() * torch.logspace(-6, 3, 48, device=device)[:, None]
    values, inverse = quantize_weight(w)
    amax = w.abs().max().float().view(1).view(torch.int32)
    parts = [quantize_weight(part, amax)[0] for part in w.split([7, 41])]
    assert torch.equal(torch.cat([part.float() for part in parts]), values.float())
    assert torch.equal(inverse_of(amax), inverse)


@pytest.mark.parametrize("shape", [(20, 48), (48, 144), (272, 16)], ids=str)
def test_transpose(shape, device, poisoned) -> None:
    y = torch.randn(shape, device=device).to(E4M3)
    found, rows = transpose(y), shape[0]
    assert torch.equal(found[:, :rows].float(), y.float().t()) and not found[:, rows:].float().any()


@torchao
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_results_and_gradients_are_torchaos(scaling, dtype, device) -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layer = nn.Linear(48, 64).to(device, dtype)
    x = torch.randn(3, 11, 48, device=device).to(dtype).requires_grad_()
    y = float8_linear(x, layer.weight, layer.bias, scaling=scaling)
    dy = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy))
    emulated = device.type == "cpu"
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(scaling), emulate=emulated, pad_inner_dim=not emulated
    )
    (theirs,) = convert_to_float8_training(nn.Sequential(layer), config=config)
    y = theirs(x)
    expected = (y, *torch.autograd.grad(y, [x, theirs.weight, theirs.bias], dy))
    for ours, torchaos in zip(found, expected, strict=True):
        # The same factors; sums in another order, or a rounding of bf16 that falls to the other side.
        torch.testing.assert_close(ours, torchaos, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-4)
        assert ours.dtype == torchaos.dtype


@pytest.mark.parametrize("scaling", SCALINGS)
def test_error_is_that_of_three_bits(scaling, device) -> None:
    x, w = torch.randn(64, 256, device=device), torch.randn(128, 256, device=device)
    exact = functional.linear(x.double(), w.double())
    error = (float8_linear(x, w, scaling=scaling) - exact).norm() / exact.norm()
    assert 0.01 < error < 0.05


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_weight_keeps_no_input(scaling, device) -> None:
    x, w = torch.randn(4, 32, device=device, requires_grad=True), torch.randn(16, 32, device=device)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = float8_linear(x, w, scaling=scaling)
    assert {t.shape for t in saved if t.dtype in (E4M3, torch.float32)} <= {w.shape}
    y.sum().backward()
    assert x.grad is not None


def test_a_weight_that_is_fp8_in_memory_computes_the_same(device) -> None:
    x, w, b = torch.randn(5, 48, device=device), torch.randn(64, 48, device=device), torch.randn(64, device=device)
    results = []
    for multiply in (lambda x: float8_linear(x, w, b), lambda x: float8_stored_linear(x, *quantize_weight(w), b)):
        leaf = x.clone().requires_grad_()
        y = multiply(leaf)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_layers_with_one_input_share_its_cast(device, monkeypatch) -> None:
    counted: list[object] = []
    plain = casts.cast
    monkeypatch.setattr(linears, "cast", lambda x, *args, **options: counted.append(x) or plain(x, *args, **options))
    x = torch.randn(4, 32, device=device)
    weights = [torch.randn(16, 32, device=device) for _ in range(3)]
    first = [float8_linear(x, w) for w in weights]
    assert len(counted) == 4
    x.mul_(-1)
    second = [float8_linear(x, w) for w in weights]
    assert len(counted) == 8
    assert all(torch.equal(a, -b) for a, b in zip(first, second, strict=True))
    kept = weakref.ref(linears._threads.last.found.rows)
    del x, counted[:]
    gc.collect()
    assert kept() is None


def test_a_cast_goes_with_its_input_whichever_thread_frees_it(device) -> None:
    """The backward pass of a layer that kept its input runs in a thread of its own."""
    held = [torch.randn(4, 32, device=device)]
    float8_linear(held[0], torch.randn(16, 32, device=device))
    kept = weakref.ref(linears._threads.last.found.rows)
    other = threading.Thread(target=held.clear)
    other.start()
    other.join()
    assert kept() is None


@pytest.mark.parametrize("packed", [False, True])
def test_an_activation_notes_the_scales_of_the_casts_around_it(packed, device, monkeypatch, poisoned) -> None:
    """Largest magnitudes of its result, and of its gradients, are those that a cast would look for: the same bits."""
    x = torch.randn(5, 32, device=device).bfloat16()
    weights = [torch.randn(96, 32, device=device).bfloat16(), torch.randn(32, 48, device=device).bfloat16()]

    def run(noting: bool) -> tuple[list[torch.Tensor], int]:
        looked: list[object] = []
        plain = casts._Amax.apply
        with monkeypatch.context() as patch, finding_largest() if noting else nullcontext():
            patch.setattr(casts._Amax, "apply", lambda x: looked.append(x) or plain(x))
            leaves = [t.clone().requires_grad_() for t in (x, *weights)]
            if packed:
                y = swiglu_packed(float8_linear(leaves[0], leaves[1]))
            else:
                gate, up = (float8_linear(leaves[0], half) for half in leaves[1].chunk(2))
                y = swiglu(gate, up)
            found = float8_linear(y, leaves[2])
            return [found, *torch.autograd.grad(found.float().square().sum(), leaves)], len(looked)

    (noted, few), (looked_for, many) = run(True), run(False)
    assert all(torch.equal(*pair) for pair in zip(noted, looked_for, strict=True))
    # That of y, and of the gradients of gate and up.
    assert many - few == (2 if packed else 3)


def test_a_tensor_that_was_written_to_has_no_largest_magnitude(device) -> None:
    gate, up = torch.randn(2, 4, 32, device=device)
    with finding_largest():
        y = swiglu(gate, up)
    assert torch.equal(largest_of(y).max(), y.abs().max().view(torch.int32))
    y.mul_(2)
    assert largest_of(y) is None


@host
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_is_eager(scaling, device) -> None:
    x, w = torch.randn(4, 32, device=device), torch.randn(16, 32, device=device)
    results = []
    multiply = lambda x, w: float8_linear(x, w, scaling=scaling).square().sum()  # noqa: E731
    for function in (multiply, torch.compile(multiply, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@host
def test_operators_are_well_formed(device) -> None:
    x = torch.randn(20, 32, device=device)
    ops = torch.ops.strata
    torch.library.opcheck(ops.float8_amax.default, (x,))
    amax = ops.float8_amax(x)
    torch.library.opcheck(ops.float8_cast.default, (x, amax, False, True, False), test_utils=("test_schema",))
    for op, args in ((ops.float8_cast, (x, amax, True, True, True)), (ops.float8_cast_rowwise, (x, True, False))):
        real, fake = op(*args), op(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in args))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]


@host
def test_wrong_arguments(device) -> None:
    x = torch.randn(4, 32)
    with pytest.raises(
        ValueError, match="weight must be a matrix with sizes divisible by 16, got float32 \\[15, 32\\]"
    ):
        float8_linear(x, torch.randn(15, 32))
    with pytest.raises(ValueError, match="scaling must be one of tensorwise, rowwise, got 'blockwise'"):
        float8_linear(x, torch.randn(16, 32), scaling="blockwise")
