"""linear_logprobs against PyTorch in the same dtype and in fp64."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import linear_cross_entropy, linear_logprobs, linear_logprobs_with_entropy
from strata_kernels.ops._launch import takes_kernel
from strata_kernels.ops.head import head_pass
from strata_kernels.ops.head.memory import ColumnPlan, plan_columns
from strata_kernels.ops.linear_cross_entropy import row_losses

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
INTERPRETED = "TRITON_INTERPRET" in os.environ
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows, vocabulary, features: one row, odd sizes, one part of the kernel and several.
SHAPES = [(1, 7, 301), (33, 300, 17), (5, 5001, 9)]
FULL = [(513, 128256, 768), (2000, 50257, 520)] if torch.cuda.is_available() else []
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap and temperature": {"softcap": 2.0, "temperature": 1.3, "ignore_index": 2},
}


def plain(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, softcap: float | None = None,
    temperature: float = 1.0, ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = functional.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = softcap * torch.tanh(z / softcap) if softcap else z
    log_p, counted = (z / temperature).log_softmax(-1), target != ignore_index
    log_probs = log_p.gather(-1, target.where(counted, 0)[..., None])[..., 0].where(counted, 0.0)
    return log_probs, -(log_p.exp() * log_p).sum(-1).where(counted, 0.0)


def problem(
    rows: int, vocabulary: int, features: int, device: torch.device, dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    x, weight, bias = torch.randn(rows, features), torch.randn(vocabulary, features), torch.randn(vocabulary)
    target = torch.randint(vocabulary, (rows,))
    target[1::4] = ignore_index
    return [x.to(device, dtype), (2 * features**-0.5 * weight).to(device, dtype), bias.to(device, dtype)], target.to(
        device
    )


@pytest.fixture
def compare_trained(within_bar: Callable[..., None]) -> Callable[..., None]:
    """Results and gradients at the bar, for incoming gradients that differ from row to row, in two dtypes alike."""

    def run(ours: Callable[..., Any], torchs: Callable[..., Any], inputs: list[Tensor]) -> None:
        results = []
        for function, dtype in ((ours, None), (torchs, None), (torchs, torch.float64)):
            leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
            found = function(*leaves)
            weights = [torch.linspace(0.25, 1.25, y.numel()).bfloat16().to(y).view(y.shape) for y in found]
            total = sum((y * w).sum() for y, w in zip(found, weights, strict=True))
            results.append([*(y.detach() for y in found), *torch.autograd.grad(total, leaves)])
        # In 16 bits the logits of the two passes may be rounded to neighbors: their products add up in another order.
        roundings = 1 if inputs[0].dtype == torch.float32 else 2
        for each in zip(*results, strict=True):
            # The gradient of x sums over the vocabulary.
            within_bar(*each, roundings, inputs[1].shape[0])

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *FULL], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["log_probs", "entropy"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_fp64(options, with_entropy, shape, dtype, path, device, compare_trained, poisoned) -> None:
    if shape in FULL and path != "gpu":
        pytest.skip("a size for a GPU")
    inputs, target = problem(*shape, device, dtype, options.get("ignore_index", -100))
    budget = 2**15 if shape in SHAPES else 2**26

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if with_entropy:
            return linear_logprobs_with_entropy(x, weight, target, bias=bias, **options, chunk_bytes=budget)
        return (linear_logprobs(x, weight, target, bias=bias, **options, chunk_bytes=budget),)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return plain(x, weight, target, bias=bias, **options)[: 1 + with_entropy]

    compare_trained(ours, torchs, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_rows_and_columns_match_fp64(dtype, device, compare_trained, monkeypatch, poisoned) -> None:
    """32 columns of 16 rows at a time, whose sums a 16-bit gradient of weight keeps in fp32."""
    inputs, target = problem(33, 100, 16, device, dtype)
    monkeypatch.setattr(row_losses, "plan_columns", lambda *_: ColumnPlan(16, 32, inputs[0].itemsize == 2))

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return linear_logprobs_with_entropy(x, weight, target, bias=bias)

    compare_trained(ours, lambda x, w, b: plain(x, w, target, bias=b), inputs)


def test_log_probs_are_negative_cross_entropies(device) -> None:
    (x, weight, bias), target = problem(9, 40, 8, device)
    expected = linear_cross_entropy(x, weight, target, bias=bias, reduction="none")
    assert torch.equal(linear_logprobs(x, weight, target, bias=bias), -expected)


def test_entropy_alone_has_a_gradient(device) -> None:
    (x, weight, bias), target = problem(9, 40, 8, device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    ours, theirs = (
        torch.autograd.grad(entropy.sum(), leaves)
        for entropy in (
            linear_logprobs_with_entropy(x, weight, target, bias=bias).entropy,
            plain(x, weight, target, bias=bias)[1],
        )
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_entropy_where_a_part_of_the_vocabulary_is_masked(device) -> None:
    """A bias of -inf takes entries out, whole blocks of the kernel too."""
    x, weight = torch.randn(2, 4, device=device), torch.randn(10000, 4, device=device)
    bias = torch.zeros(10000, device=device)
    bias[:5000] = -torch.inf
    target = torch.tensor([7000, 5000], device=device)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = linear_logprobs_with_entropy(*leaves, target, bias=bias)
    expected = plain(x, weight[5000:], target - 5000)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(torch.autograd.grad(sum(y.sum() for y in t), leaves) for t in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_the_forward_pass_computes_logits_alone(frozen, device, monkeypatch) -> None:
    (x, weight, _), target = problem(6, 20, 8, device)
    flops = []

    def counting(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            a, b = args[-2:]
            flops.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return product(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "mm", counting(torch.mm))
    monkeypatch.setattr(torch, "addmm", counting(torch.addmm))
    log_probs = linear_logprobs(x.requires_grad_(), weight.requires_grad_(not frozen), target)
    assert sum(flops) == 2 * 6 * 20 * 8
    log_probs.sum().backward()
    assert sum(flops) == (6 if frozen else 8) * 6 * 20 * 8


@pytest.mark.parametrize("most", [9, 11, 20])
def test_ignored_rows_are_dropped(most, device, gradients, monkeypatch) -> None:
    """Nine of twelve rows are not ignored."""
    inputs, target = problem(12, 40, 8, device)
    sizes = []
    run = head_pass.HeadPass.__init__
    monkeypatch.setattr(
        head_pass.HeadPass, "__init__", lambda self, x, *rest, **by: sizes.append(len(x)) or run(self, x, *rest, **by)
    )

    def call(**given: int) -> list[Tensor]:
        return gradients(lambda x, w: linear_logprobs_with_entropy(x, w, target, **given), inputs[:2])

    kept = call(max_targets=most)
    assert set(sizes) == {min(most, 12)}
    for a, b in zip(kept, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_more_targets_than_announced(device) -> None:
    (x, weight, _), target = problem(12, 40, 8, device)
    log_probs = linear_logprobs(x, weight.requires_grad_(), target, max_targets=8)
    assert log_probs.isnan().all() and torch.autograd.grad(log_probs.sum(), weight)[0].isnan().all()


def test_compiled_equals_eager(device, gradients) -> None:
    inputs, target = problem(7, 30, 8, device)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = linear_logprobs_with_entropy(x.sin(), weight, target, bias=bias, temperature=0.8)
        return found.log_probs.exp(), found.entropy

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, inputs), gradients(compiled, inputs), strict=True):
        assert torch.equal(a, b)


def test_runs_repeat_bit_for_bit(device, gradients) -> None:
    inputs, target = problem(40, 150, 8, device)
    function = lambda x, w: linear_logprobs_with_entropy(x, w, target, chunk_bytes=2**12)  # noqa: E731
    for a, b in zip(gradients(function, inputs[:2]), gradients(function, inputs[:2]), strict=True):
        assert torch.equal(a, b)


def test_fp64_is_differentiated_exactly(device) -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in ((4, 3), (6, 3), 6))
    target = torch.tensor([0, 5, -100, 2], device=device)
    options = {"softcap": 2.0, "temperature": 0.6}
    function = lambda x, w, b: tuple(linear_logprobs_with_entropy(x, w, target, bias=b, **options))  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight, bias))


def test_transforms_of_functions_see_plain_pytorch(device) -> None:
    (x, weight, _), target = problem(6, 20, 8, device)
    ours, theirs = (
        torch.func.grad(lambda x, w, f=f: sum(y.sum() for y in f(x, w, target, temperature=0.8)), argnums=(0, 1))(
            x, weight
        )
        for f in (linear_logprobs_with_entropy, plain)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape, device, poisoned) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(20, 8, device=device, requires_grad=True)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    found = linear_logprobs_with_entropy(x, weight, target)
    assert found.log_probs.shape == found.entropy.shape == shape[:-1]
    sum(y.sum() for y in found).backward()
    assert x.grad.shape == shape and not weight.grad.any()


@pytest.mark.parametrize("scale", [1e-4, 1e3, 1e15])
def test_extreme_logits(scale, device, compare_trained) -> None:
    (x, weight, _), target = problem(6, 300, 8, device)
    compare_trained(
        lambda x, w: linear_logprobs_with_entropy(x, w, target), lambda x, w: plain(x, w, target), [scale * x, weight]
    )


def test_double_backward_is_refused(device) -> None:
    (x, weight, _), target = problem(5, 20, 8, device)
    log_probs = linear_logprobs(x.requires_grad_(), weight, target)
    with pytest.raises(NotImplementedError, match="only once"):
        torch.autograd.grad(log_probs.sum(), x, create_graph=True)


def test_a_target_outside_the_vocabulary(device) -> None:
    (x, weight, _), target = problem(5, 20, 8, device)
    target[2] = 20
    if not takes_kernel(x):
        with pytest.raises(IndexError, match="out of bounds for 20 classes"):
            linear_logprobs(x, weight, target)
        return
    log_probs = linear_logprobs(x.requires_grad_(), weight, target)
    assert log_probs.isnan().tolist() == [False, False, True, False, False]
    assert torch.autograd.grad(log_probs.sum(), x)[0].isnan().any(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"softcap": -1.0}, "softcap -1.0 must be positive"),
        ({"accumulate": "fast"}, "one of exact, lean"),
        ({"chunk_bytes": 0}, "chunk_bytes 0 must be positive"),
        ({"max_targets": -1}, "max_targets -1 must not be negative"),
    ],
    ids=str,
)
def test_wrong_options(options, message, device) -> None:
    (x, weight, _), target = problem(5, 20, 8, device)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(x, weight, target, **options)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((8192, 128256, 2, True, True, 320 * 2**20), ColumnPlan(8192, 18432, False)),
        ((100, 128256, 2, True, True, 320 * 2**20), ColumnPlan(100, 128256, False)),
        ((2**20, 128256, 2, True, True, 320 * 2**20), ColumnPlan(81920, 2048, True)),
        ((2**20, 128256, 2, False, True, 320 * 2**20), ColumnPlan(81920, 2048, False)),
        ((33, 300, 4, True, True, 4096), ColumnPlan(3, 300, False)),
        ((0, 300, 4, True, True, 4096), ColumnPlan(1, 300, False)),
    ],
    ids=str,
)  # fmt: skip
def test_plan_of_columns(size, expected) -> None:
    plan = plan_columns(*size)
    assert plan == expected and plan.buffer_size * size[2] <= size[-1] + 64 * size[2] * plan.rows
