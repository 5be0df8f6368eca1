"""linear_cross_entropy against PyTorch in the same dtype and in fp64."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from strata_kernels import linear_cross_entropy
from strata_kernels.ops._cross_entropy import Options, cross_entropy_rows
from strata_kernels.ops._launch import takes_kernel
from strata_kernels.ops.linear_cross_entropy import chunk_plan

# The package's attribute of this name is the function.
module = sys.modules["strata_kernels.ops.linear_cross_entropy"]

# The matrix products around the kernel are PyTorch's; the kernel itself computes in fp32, which is slow to emulate.
DTYPES = [torch.float32] if "TRITON_INTERPRET" in os.environ else [torch.float32, torch.float16, torch.bfloat16]
# Rows, vocabulary, features: one row, odd sizes, more than one chunk, more than one block of the vocabulary.
SHAPES = [(1, 7, 301), (7, 130, 33), (130, 300, 17), (2, 20000, 5)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "ignore_index": 2},
    "items": {"num_items": 5},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "z_loss": 0.01},
}


def plain(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    z = functional.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)).flatten(0, -2)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    target = target.flatten()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    valid = target != ignore_index
    if reduction == "mean" and num_items is None:
        loss = functional.cross_entropy(z, target, **options)
        return loss + z_loss * z.logsumexp(-1).square()[valid].mean() if z_loss else loss
    loss = functional.cross_entropy(z, target, **options, reduction="none") + z_loss * z.logsumexp(-1).square() * valid
    if reduction == "none":
        return loss.view(x.shape[:-1])
    return loss.sum() / num_items if num_items is not None else loss.sum()


@pytest.fixture
def problem(device: torch.device) -> Callable[..., tuple[list[Tensor], Tensor]]:
    """`problem(rows, vocabulary, features)`: x, weight and bias, and targets of which every fourth is ignored."""

    def make(
        rows: int, vocabulary: int, features: int, dtype: torch.dtype = torch.float32, ignore_index: int = -100
    ) -> tuple[list[Tensor], Tensor]:
        x, weight, bias = torch.randn(rows, features), torch.randn(vocabulary, features), torch.randn(vocabulary)
        target = torch.randint(vocabulary, (rows,))
        target[1::4] = ignore_index
        inputs = [x.to(device, dtype), (2 * features**-0.5 * weight).to(device, dtype), bias.to(device, dtype)]
        return inputs, target.to(device)

    return make


@pytest.fixture
def compare_trained(within_bar: Callable[..., None]) -> Callable[..., None]:
    """`compare`, with the incoming gradient of one that a training step has: nothing but the operator's own error."""

    def run(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        results = []
        for function, dtype in ((ours, None), (torchs, None), (torchs, torch.float64)):
            leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
            loss = function(*leaves)
            results.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
        for each in zip(*results, strict=True):
            within_bar(*each)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_fp64(options, shape, dtype, problem, compare_trained, poisoned, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 2**18)
    inputs, target = problem(*shape, dtype, options.get("ignore_index", -100))

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x, weight, target, **options)

    compare_trained(call(linear_cross_entropy), call(plain), inputs[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["none"]], ids=["mean", "none"])
def test_incoming_gradient(options, dtype, problem, compare, poisoned) -> None:
    inputs, target = problem(64, 200, 64, dtype)

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x, weight, target, **options)

    compare(call(linear_cross_entropy), call(plain), inputs[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_smaller_than_fp16_survive_a_loss_scale(dtype, problem, compare_trained) -> None:
    inputs, target = problem(9, 200, 16, dtype)

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: 2.0**16 * function(x, weight, target, num_items=10**6)

    compare_trained(call(linear_cross_entropy), call(plain), inputs[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"], OPTIONS["none"]], ids=["plain", "all", "none"])
def test_bias(options, dtype, problem, compare_trained, poisoned) -> None:
    inputs, target = problem(9, 50, 16, dtype, options.get("ignore_index", -100))

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight, bias: function(x, weight, target, bias=bias, **options)

    compare_trained(call(linear_cross_entropy), call(plain), inputs)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is tested is around the kernel")
def test_many_chunks_accumulate_in_fp32(problem, compare_trained, monkeypatch) -> None:
    """With a budget of 16 rows and 128 rows to a chunk, six chunks: one more than bf16 accumulation would stand."""
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 2**12)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2**12)
    inputs, target = problem(768, 40, 4, torch.bfloat16)
    assert chunk_plan(768, 40, 4, 2, True, 2**12) == (128, True)
    compare_trained(lambda x, w: linear_cross_entropy(x, w, target), lambda x, w: plain(x, w, target), inputs[:2])


@pytest.mark.parametrize(
    ("rows", "vocabulary", "hidden", "itemsize", "weight_grad", "expected"),
    [
        (8192, 128256, 4096, 2, True, (2048, False)),
        (8192, 128256, 4096, 2, False, (2048, False)),
        (2100, 128256, 4096, 2, True, (1152, False)),
        (16384, 128256, 4096, 2, True, (4096, False)),
        (65536, 128256, 4096, 2, True, (2048, True)),
        (65536, 128256, 4096, 2, False, (2048, False)),
        (65536, 128256, 4096, 4, True, (1152, False)),
        (4096, 4096, 256, 2, True, (4096, False)),
        (1, 10**9, 8, 2, True, (1, False)),
        (0, 100, 8, 2, True, (1, False)),
    ],
)
def test_chunk_plan(rows, vocabulary, hidden, itemsize, weight_grad, expected) -> None:
    assert chunk_plan(rows, vocabulary, hidden, itemsize, weight_grad, 512 * 2**20) == expected


def test_logits_are_never_held_whole(problem, monkeypatch) -> None:
    inputs, target = problem(160, 300, 8)
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 2**17)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2**17)
    sizes = []
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *a, **k: sizes.append((y := new_empty(x, *a, **k)).numel()) or y)
    linear_cross_entropy(*(x.requires_grad_() for x in inputs[:2]), target).backward()
    assert 128 * 320 in sizes and max(sizes) == 128 * 320


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_runs_repeat_bit_for_bit(reduction, problem, gradients, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", 2**12)
    inputs, target = problem(140, 60, 8)
    first, second = (
        gradients(lambda x, w, b: linear_cross_entropy(x, w, target, bias=b, reduction=reduction), inputs) for _ in "ab"
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled_equals_eager(reduction, problem, gradients) -> None:
    inputs, target = problem(7, 30, 8)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x.sin(), weight, target, bias=bias, reduction=reduction).cos()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    pairs = zip(gradients(function, inputs), gradients(compiled, inputs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_compiled_with_items_on_the_device(problem, gradients) -> None:
    inputs, target = problem(7, 30, 8)
    items = torch.tensor(11, device=target.device)
    function = lambda x, w: linear_cross_entropy(x, w, target, num_items=items)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    pairs = zip(gradients(function, inputs[:2]), gradients(compiled, inputs[:2]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    torch.testing.assert_close(function(*inputs[:2]), plain(*inputs[:2], target, num_items=11))


@pytest.mark.parametrize("items", [7, torch.tensor(7), torch.tensor([7.0], dtype=torch.float64)], ids=repr)
def test_the_dtype_of_the_divisor_leaves_the_loss_alone(items, problem) -> None:
    (x, weight, _), target = problem(7, 30, 8)
    for dtype in (torch.float32, torch.float16):
        loss = linear_cross_entropy(x.to(dtype), weight.to(dtype), target, num_items=items)
        assert loss.dtype == torch.float32 and loss.shape == ()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(problem) -> None:
    (x, weight, bias), target = problem(6, 20, 8)
    options = (-100, 0.1, 0.01, 2.0, True, True, True)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    operators = torch.ops.strata
    torch.library.opcheck(operators.linear_cross_entropy.default, (torch.tensor(3.0).to(x), *leaves, target, *options))
    torch.library.opcheck(operators.linear_cross_entropy_rows.default, (*leaves, target, *options))
    data = [t.detach() for t in leaves]
    torch.library.opcheck(operators.linear_cross_entropy_rows_bwd.default, (data[0][:, 0], *data, target, *options))


class Outputs(TorchDispatchMode):
    """Notes the shapes that the operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.strata.linear_cross_entropy.default:
            self.shapes = [tuple(x.shape) for x in result]
        return result


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)], ids=str)
def test_computes_only_the_gradients_that_are_needed(trained, problem) -> None:
    (x, weight, bias), target = problem(5, 20, 8)
    x.requires_grad_(trained[0]), weight.requires_grad_(trained[1])
    with Outputs() as outputs:
        loss = linear_cross_entropy(x, weight, target, bias=bias)
    assert loss.requires_grad == any(trained)
    assert outputs.shapes[1:] == [(5, 8) if trained[0] else (0,), (20, 8) if trained[1] else (0,), (0,)]
    with Outputs() as outputs, torch.no_grad():
        linear_cross_entropy(x, weight, target, bias=bias)
    assert outputs.shapes[1:] == [(0,), (0,), (0,)]


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_over_a_kept_graph(reduction, factor, problem) -> None:
    (x, weight, _), target = problem(5, 20, 8)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*inputs, target, reduction=reduction)
    incoming = torch.full_like(loss, factor)
    kept = torch.autograd.grad(loss, inputs, incoming, retain_graph=True)
    copies = [x.clone() for x in kept]
    last = torch.autograd.grad(loss, inputs, incoming)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, copies, last, strict=True))


def test_weight_gradient_is_handed_over_without_a_copy(problem, monkeypatch) -> None:
    (x, weight, _), target = problem(5, 20, 8)
    addresses = []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *args: addresses.append((result := run(*args))[2].data_ptr()) or result)
    linear_cross_entropy(x, weight.requires_grad_(), target).backward()
    assert takes_kernel(x) == (addresses == [weight.grad.data_ptr()])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(reduction, problem) -> None:
    (x, weight, _), target = problem(5, 20, 8)
    loss = linear_cross_entropy(x.requires_grad_(), weight, target, reduction=reduction).sum()
    with pytest.raises(NotImplementedError, match="only once"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_fp64_is_differentiated_exactly(device) -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in ((4, 3), (6, 3), 6))
    target = torch.tensor([0, 5, -100, 2], device=device)
    for reduction in ("mean", "sum", "none"):

        def function(x: Tensor, weight: Tensor, bias: Tensor, reduction: str = reduction) -> Tensor:
            options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "reduction": reduction}
            return linear_cross_entropy(x, weight, target, bias=bias, **options)

        assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, problem) -> None:
    (x, weight, bias), target = problem(5, 20, 8)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(x.device.type, dtype):
        loss = linear_cross_entropy(*leaves[:2], target, bias=leaves[2])
        expected = linear_cross_entropy(x.to(dtype), weight.to(dtype), target, bias=bias.to(dtype))
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, leaves)
    assert [g.dtype for g in gradients] == [torch.float32] * 3


STRIDED = {
    "batch and sequence": lambda x, w: (x.view(2, 3, 8), w),
    "transposed": lambda x, w: (x.view(2, 3, 8).transpose(0, 1), w),
    "every other feature": lambda x, w: (x[:, ::2], w[:, 1::2]),
    "weight of another layout": lambda x, w: (x, w.t().contiguous().t()),
    "unaligned": lambda x, w: (x[:, 1:], w[:, :-1]),
    "expanded": lambda x, w: (x[:1].expand(6, -1), w),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, problem, gradients, poisoned) -> None:
    (x, weight, _), target = problem(6, 20, 8)
    x, weight = view(x, weight)
    target = target.view(x.shape[:-1])
    given, copied = (
        gradients(lambda x, w: linear_cross_entropy(x, w, target), [make(x), make(weight)])
        for make in (lambda t: t, torch.Tensor.contiguous)
    )
    for a, b in zip(given, copied, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_of_logits_far_apart(far, device) -> None:
    z, target = far(3, 64), torch.tensor([3, -100, 60], device=device)
    given, dense = z, z.clone()
    losses = [torch.empty(3, device=device) for _ in "ab"]
    for logits, loss in zip((given, dense), losses, strict=True):
        cross_entropy_rows(logits, target, torch.ones(3, device=device), loss, Options(-100, 0.1, 0.01, 0.0), True)
    assert torch.equal(given, dense) and torch.equal(*losses) and losses[0].isfinite().all()


def test_strided_targets(problem) -> None:
    (x, weight, _), _ = problem(6, 20, 8)
    target = torch.randint(20, (12,), device=x.device)[::2]
    for given in (target, target[:1].expand(6)):
        expected = linear_cross_entropy(x, weight, given.contiguous(), reduction="none")
        assert torch.equal(linear_cross_entropy(x, weight, given, reduction="none"), expected)


def test_all_rows_ignored(problem) -> None:
    (x, weight, _), target = problem(5, 20, 8)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    target.fill_(-100)
    for reduction, expected in {"sum": 0.0, "mean": float("nan")}.items():
        loss = linear_cross_entropy(*inputs, target, reduction=reduction)
        torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
        assert all(not g.any() for g in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape, device, poisoned) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device, requires_grad=True)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    linear_cross_entropy(x, weight, target, reduction="sum").backward()
    assert x.grad.shape == shape and not weight.grad.any()
    assert linear_cross_entropy(x, weight, target, reduction="none").shape == shape[:-1]
    assert linear_cross_entropy(x, weight, target).isnan()


@pytest.mark.parametrize("scale", [1e-4, 1e3, 1e15])
def test_extreme_logits(scale, problem, compare) -> None:
    (x, weight, _), target = problem(6, 300, 8)
    compare(lambda x, w: linear_cross_entropy(x, w, target), lambda x, w: plain(x, w, target), [scale * x, weight])


def test_masked_part_of_the_vocabulary(device) -> None:
    """A bias of -inf takes entries out, whole blocks of the kernel too."""
    x, weight = torch.randn(2, 4, device=device), torch.randn(40000, 4, device=device)
    bias = torch.zeros(40000, device=device)
    bias[:20000] = -torch.inf
    target = torch.tensor([30000, 20000], device=device)
    loss = linear_cross_entropy(x, weight, target, bias=bias)
    torch.testing.assert_close(loss, plain(x, weight[20000:], target - 20000))


@pytest.mark.parametrize("wrong", [20, -1, 2**40])
def test_target_outside_the_vocabulary(wrong, problem) -> None:
    (x, weight, _), target = problem(5, 20, 8)
    target[2] = wrong
    if takes_kernel(x):
        losses = linear_cross_entropy(x, weight, target, reduction="none")
        assert losses.isnan().tolist() == [False, False, True, False, False]
    else:
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            linear_cross_entropy(x, weight, target)


X, W, T = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, W[:, :3], T), {}, r"\[V, H\] with the same H"),
        ((X, W[0], T), {}, r"\[V, H\] with the same H"),
        ((X, W[:0], T), {}, "at least one class and one feature"),
        ((X[:, :0], W[:, :0], T), {}, "at least one class and one feature"),
        ((X, W, T[:2]), {}, r"target int64 \[2\] must be int64 \[3\]"),
        ((X, W, T.int()), {}, r"target int32 \[3\] must be int64 \[3\]"),
        ((X, W, T), {"bias": X[0]}, r"bias float32 \[4\] must be \[5\]"),
        ((X, W.half(), T), {}, r"one dtype of .*, not float32 \[3, 4\], float16 \[5, 4\]"),
        ((X.int(), W.int(), T), {}, "one dtype of bf16, fp16, fp32, fp64, not int32"),
        ((X.to(torch.float8_e5m2), W.to(torch.float8_e5m2), T), {}, "not float8_e5m2"),
        ((X, W, T), {"label_smoothing": 1.5}, "label_smoothing 1.5 must be between 0 and 1"),
        ((X, W, T), {"softcap": 0.0}, "softcap 0.0 must be positive"),
        ((X, W, T), {"reduction": "avg"}, "reduction 'avg' must be one of mean, sum, none"),
        ((X, W, T), {"reduction": "sum", "num_items": 3}, "contradicts reduction 'sum'"),
        ((X, W, T), {"num_items": torch.ones(2)}, "must have one element"),
        ((X, W, T.to("meta")), {}, "on one device"),
    ],
)
def test_wrong_arguments(arguments, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*arguments, **options)
