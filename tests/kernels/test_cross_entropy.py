"""cross_entropy against PyTorch in the same dtype and in fp64."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from strata_kernels import cross_entropy, cross_entropy_with_predictions
from strata_kernels.ops._launch import recording, takes_kernel
from strata_kernels.ops.cross_entropy.row_statistics import Columns, Options, Statistics, losses_of
from strata_kernels.ops.cross_entropy.rows import padded_width, partial_gradient, partial_statistics, rows_of
from strata_kernels.warmup.plan import record

INTERPRETED = "TRITON_INTERPRET" in os.environ
# The interpreter truncates where a GPU rounds; that it does in one dtype is enough.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows and classes: one row, odd sizes, more parts of a row than one; on a GPU those of real vocabularies, too.
SHAPES = [(1, 7), (5, 300), (2, 5001)]
if torch.cuda.is_available():
    SHAPES += [(33, 50257), (500, 32000), (150, 128256), (9, 262208)]
around_the_kernel = pytest.mark.skipif(INTERPRETED, reason="what is tested is around the kernel")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.0},
    "weight": {"weight": True},
    "all": {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "ignore_index": 2},
    "items": {"num_items": 5, "weight": True},
    "sum": {"reduction": "sum", "weight": True, "label_smoothing": 0.1},
    "none": {"reduction": "none", "z_loss": 0.01},
    "all, none": {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "reduction": "none"},
}


def plain(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    labels = target.flatten()
    weight = None if weight is None else weight.to(z.dtype)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "mean" and num_items is None and not z_loss:
        return functional.cross_entropy(z, labels, **options)
    counted = labels != ignore_index
    loss = (
        functional.cross_entropy(z, labels, **options, reduction="none") + z_loss * z.logsumexp(-1).square() * counted
    )
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "mean" and num_items is None:
        num_items = counted.sum() if weight is None else weight[labels[counted]].sum()
    return loss.sum() if num_items is None else loss.sum() / num_items


@pytest.fixture
def problem(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, dict[str, Any]]]:
    """`problem(shape, dtype, options)`: logits, targets of which every fourth is ignored, options with the weights."""

    def make(
        shape: tuple[int, ...], dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        options = dict(options or {})
        logits, target = 2 * torch.randn(shape), torch.randint(shape[-1], shape[:-1])
        target.view(-1)[1::4] = options.get("ignore_index", -100)
        if "weight" in options:
            options["weight"] = (torch.rand(shape[-1]) + 0.1).to(device)
        return logits.to(device, dtype), target.to(device), options

    return make


def called(function: Callable[..., Tensor], target: Tensor, options: dict[str, Any]) -> Callable[..., Tensor]:
    """`function` of the logits alone; for fp64 logits with fp64 weights."""

    def call(logits: Tensor) -> Tensor:
        weight = options.get("weight")
        given = options if weight is None or logits.dtype != torch.float64 else {**options, "weight": weight.double()}
        return function(logits, target, **given)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_fp64(options, shape, dtype, problem, within_bar, poisoned) -> None:
    logits, target, options = problem(shape, dtype, options)
    results = []
    for function, given in ((cross_entropy, logits), (plain, logits), (plain, logits.double())):
        leaf = given.clone().requires_grad_()
        loss = called(function, target, options)(leaf)
        # The incoming gradient of one that a training step has: nothing but the operator's own error.
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaf)])
    for each in zip(*results, strict=True):
        within_bar(*each)


@pytest.mark.parametrize("offset", [1e3, 1e5, 1e6])
@pytest.mark.parametrize("shape", [(5, 300), (2, 5001)], ids=str)
@pytest.mark.parametrize("options", ["plain", "smoothing", "z-loss", "sum", "none"])
def test_logits_far_from_zero(options, shape, offset, problem, compare) -> None:
    """lse loses their digits: neither loss nor gradient may be made from it."""
    logits, target, options = problem(shape, torch.float32, OPTIONS[options])
    compare(called(cross_entropy, target, options), called(plain, target, options), [logits + offset])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_incoming_gradients_of_rows(dtype, problem, compare, poisoned) -> None:
    logits, target, options = problem((16, 200), dtype, {"reduction": "none"})
    compare(called(cross_entropy, target, options), called(plain, target, options), [logits])


def test_incoming_gradients_far_apart(problem) -> None:
    """A column of a wide matrix: the third row's is 2^31 elements behind the first one's."""
    logits, target, _ = problem((3, 30))
    target.fill_(3)
    # On a CPU only the pages of the three elements are touched.
    memory = torch.empty(2**31 + 1, dtype=torch.float32, device=logits.device)
    incoming = torch.randn(3, device=logits.device)
    far = memory.as_strided((3,), (2**30,)).copy_(incoming)
    losses = cross_entropy(logits.requires_grad_(), target, reduction="none")
    given, dense = (torch.autograd.grad(losses, logits, x, retain_graph=True)[0] for x in (far, incoming))
    assert torch.equal(given, dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.125, 3.0])
def test_incoming_gradient_of_a_scalar(factor, dtype, problem, within_bar) -> None:
    """By a power of two no gradient is rounded a second time; by another factor of bf16, once more."""
    logits, target, _ = problem((16, 200), dtype)
    results = []
    for function, given in ((cross_entropy, logits), (plain, logits), (plain, logits.double())):
        leaf = given.clone().requires_grad_()
        results += torch.autograd.grad(function(leaf, target) * factor, leaf)
    if dtype == torch.bfloat16 and factor == 3.0:
        torch.testing.assert_close(results[0].double(), results[2], rtol=2 * torch.finfo(dtype).eps, atol=1e-9)
    else:
        within_bar(*results)


@around_the_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_smaller_than_fp16_survive_a_loss_scale(dtype, problem, within_bar) -> None:
    logits, target, _ = problem((9, 200), dtype)
    results = []
    for function, given in ((cross_entropy, logits), (plain, logits), (plain, logits.double())):
        leaf = given.clone().requires_grad_()
        results += torch.autograd.grad(2.0**16 * function(leaf, target, num_items=10**6), leaf)
    within_bar(*results)


VIEWS = {
    "all but the last position": ((3, 6, 40), lambda z: z[:, :-1], True),
    "some columns": ((5, 50), lambda z: z[:, 3:45], True),
    "transposed": ((3, 4, 40), lambda z: z.transpose(0, 1), True),
    "one row for all": ((1, 40), lambda z: z.expand(6, -1), True),
    "rows that collapse": ((2, 3, 4, 40), lambda z: z[:, :, :, :20], True),
    "classes apart": ((40, 6), lambda z: z.t(), False),
    "three strides": ((4, 3, 2, 40), lambda z: z.permute(2, 1, 0, 3), False),
}


@pytest.mark.parametrize("reduction", ["none"] if INTERPRETED else ["mean", "none"])
@pytest.mark.parametrize(("shape", "view", "in_place"), VIEWS.values(), ids=VIEWS.keys())
def test_strided_logits(shape, view, in_place, reduction, device, gradients, poisoned) -> None:
    logits = torch.randn(shape, device=device)
    seen = view(logits)
    assert (rows_of(seen).data_ptr() == seen.data_ptr()) == in_place
    target = torch.randint(seen.shape[-1], (*seen.shape[:-1], 2), device=device)[..., 0]
    given, copied = (
        gradients(lambda z, f=f: cross_entropy(f(view(z)), target, reduction=reduction), [logits])
        for f in (lambda z: z, torch.Tensor.contiguous)
    )
    for a, b in zip(given, copied, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_far_apart(far, device) -> None:
    logits, target = far(3, 64), torch.tensor([3, -100, 60], device=device)
    losses = [cross_entropy(z, target, reduction="none") for z in (logits, logits.clone())]
    assert torch.equal(*losses) and losses[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
def test_runs_repeat_bit_for_bit(options, problem, gradients) -> None:
    logits, target, options = problem((5, 5000), torch.float32, options)
    first, second = (gradients(called(cross_entropy, target, options), [logits]) for _ in "ab")
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("classes", "reduction"), [(40, "mean"), (40, "sum"), (5000, "mean"), (5000, "none")])
def test_predictions(classes, reduction, problem, gradients) -> None:
    logits, target, _ = problem((3, 2, classes))
    target[0, 0] = logits[0, 0].argmax()
    logits[2, 1, 17] = logits[2, 1, classes - 1] = 50.0
    target[2, 1] = 3
    expected = logits.argmax(-1).where(target != -100, -1)
    assert expected[2, 1] == 17
    loss, predictions, accuracy = cross_entropy_with_predictions(logits, target, reduction=reduction, softcap=60.0)
    assert torch.equal(predictions, expected) and torch.equal(
        loss, cross_entropy(logits, target, reduction=reduction, softcap=60.0)
    )
    counted = target != -100
    torch.testing.assert_close(accuracy, (expected == target)[counted].float().mean())
    given, without = (
        gradients(f, [logits])
        for f in (
            lambda z: cross_entropy_with_predictions(z, target, reduction=reduction).loss,
            lambda z: cross_entropy(z, target, reduction=reduction),
        )
    )
    assert all(map(torch.equal, given, without))


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("view", [lambda z: z, lambda z: z[:, :-1]], ids=["dense", "strided"])
def test_reused_logits_hold_the_gradient(view, factor, problem) -> None:
    x, target, _ = problem((3, 4, 30))
    x, target = x.requires_grad_(), view(target).contiguous()
    incoming = torch.tensor(factor, device=x.device)
    expected = torch.autograd.grad(cross_entropy(view(x.sin()), target), x, incoming)
    logits = view(x.sin())
    (dlogits,) = torch.autograd.grad(cross_entropy(logits, target), logits)
    loss = cross_entropy(logits, target, reuse_logits=True)
    assert torch.equal(logits, dlogits)
    kept = torch.autograd.grad(loss, x, incoming, retain_graph=True)
    for found in (kept, torch.autograd.grad(loss, x, incoming)):
        torch.testing.assert_close(found, expected)


def test_reuse_hands_the_logits_memory_over(problem) -> None:
    x, target, _ = problem((3, 30))
    logits = x.requires_grad_() * 2
    (dlogits,) = torch.autograd.grad(cross_entropy(logits, target, reuse_logits=True), logits)
    assert (dlogits.data_ptr() == logits.data_ptr()) == takes_kernel(x)


@pytest.mark.parametrize(("width", "first"), [(53, 0), (53, 3), (56, 0)], ids=str)
def test_reuse_touches_no_other_memory(width, first, device) -> None:
    """Neither beside the columns nor in other rows, wherever 16 bytes begin; inside, sums may be in another order."""
    x, target = torch.randn(3, width, device=device, requires_grad=True), torch.tensor([1, 2, 44], device=device)
    memory = x * 1
    logits = memory[:, first : first + 45]
    expected = x.detach().clone()
    expected[:, first : first + 45] = torch.autograd.grad(cross_entropy(logits, target), logits)[0]
    cross_entropy(logits, target, reuse_logits=True)
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside[:, first : first + 45] = False
    assert torch.equal(memory[outside], expected[outside])
    torch.testing.assert_close(memory, expected, atol=1e-7, rtol=1e-5)


@around_the_kernel
def test_reuse_is_refused_where_values_would_be_missed(problem) -> None:
    x, target, _ = problem((3, 30))
    with pytest.raises(ValueError, match="overwrite a leaf"):
        cross_entropy(x.requires_grad_(), target, reuse_logits=True)
    for view in (lambda z: z[:1].expand(3, -1), lambda z: z.t().contiguous().t()):
        with pytest.raises(ValueError, match="no overlap"):
            cross_entropy(view(x * 2), target, reuse_logits=True)
    loss = cross_entropy(x.tanh(), target, reuse_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        logits = x * 2
        cross_entropy(logits, target, reuse_logits=True)
        assert torch.equal(logits, x * 2)


@around_the_kernel
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_equals_eager(reduction, problem, gradients) -> None:
    backend = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(x.sin(), target, reduction=reduction, z_loss=0.1, reuse_logits=True).cos()

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for rows in (5, 6, 9):
        x, target, _ = problem((2, rows, 30))
        runs = (functools.partial(f, target=target) for f in (function, compiled))
        for a, b in zip(*(gradients(run, [x]) for run in runs), strict=True):
            torch.testing.assert_close(a, b)
    # For the first size, and for all others.
    assert backend.frame_count <= 2


@around_the_kernel
@pytest.mark.parametrize("items", [7, torch.tensor(7), torch.tensor([7.0], dtype=torch.float64)], ids=repr)
def test_number_of_items(items, problem) -> None:
    logits, target, _ = problem((7, 30))
    for dtype in (torch.float32, torch.float16):
        given = logits.to(dtype).requires_grad_()
        loss = cross_entropy(given, target, num_items=items)
        assert loss.dtype == torch.float32 and loss.shape == ()
        torch.testing.assert_close(loss, plain(given, target, num_items=7))


@around_the_kernel
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(problem) -> None:
    logits, target, options = problem((2, 3, 20), options={"weight": True})
    logits, weight, flags = logits.requires_grad_(), options["weight"], (-100, 0.1, 0.01, 2.0)
    operators = torch.ops.strata
    for items, mean in ((None, True), (None, False), (torch.tensor(3.0).to(logits), True)):
        inputs = (logits, weight, target, items, mean, *flags, True, True)
        torch.library.opcheck(operators.cross_entropy.default, inputs)
    torch.library.opcheck(operators.cross_entropy_rows.default, (logits, weight, target, *flags, True))
    rows = torch.rand(6).to(logits)
    inputs = (rows.view(2, 3), logits.detach(), weight, target, rows, rows, rows, *flags)
    torch.library.opcheck(operators.cross_entropy_rows_bwd.default, inputs)


@around_the_kernel
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_over_a_kept_graph(reduction, problem) -> None:
    logits, target, _ = problem((5, 20))
    logits.requires_grad_()
    loss = cross_entropy(logits, target, reduction=reduction)
    # No bf16 number: in fp32 each time.
    incoming = torch.full_like(loss, 0.3337)
    (kept,) = torch.autograd.grad(loss, logits, incoming, retain_graph=True)
    copy = kept.clone()
    (last,) = torch.autograd.grad(loss, logits, incoming)
    assert torch.equal(kept, last) and torch.equal(kept, copy)


def test_batch_of_incoming_gradients(problem) -> None:
    logits, target, _ = problem((5, 20))
    loss = cross_entropy(logits.requires_grad_(), target)
    (given,) = torch.autograd.grad(loss, logits, torch.tensor([1.0, 3.0]).to(loss), is_grads_batched=True)
    (expected,) = torch.autograd.grad(cross_entropy(logits, target), logits)
    torch.testing.assert_close(given, torch.stack((expected, 3 * expected)))


@around_the_kernel
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(reduction, problem) -> None:
    logits, target, _ = problem((5, 20))
    loss = cross_entropy(logits.requires_grad_(), target, reduction=reduction).sum()
    with pytest.raises(NotImplementedError, match="cross_entropy can be differentiated only once"):
        torch.autograd.grad(loss, logits, create_graph=True)


@around_the_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_transforms_of_functions_see_plain_pytorch(options, problem) -> None:
    logits, target, options = problem((2, 5, 20), torch.float32, options)
    ours, theirs = (called(f, target, options) for f in (cross_entropy, plain))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(logits), transform(theirs)(logits))


@around_the_kernel
def test_transforms_of_functions_take_rows_that_are_masked_whole(device) -> None:
    logits = torch.full((1, 5), torch.finfo(torch.float32).min, device=device)
    target = torch.tensor([2], device=device)
    gradient, loss = torch.func.grad_and_value(lambda z: cross_entropy(z, target))(logits)
    torch.testing.assert_close(loss, torch.tensor(5.0, device=device).log())
    torch.testing.assert_close(gradient, 0.2 - torch.eye(5, device=device)[target])


@around_the_kernel
def test_fp64_is_differentiated_exactly(device) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, device=device).requires_grad_()
    target, weight = torch.tensor([0, 5, -100, 2], device=device), torch.rand(6, dtype=torch.float64, device=device)
    options = {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}
    for reduction in ("mean", "sum", "none"):
        function = functools.partial(cross_entropy, target=target, reduction=reduction, **options)
        assert torch.autograd.gradcheck(function, logits)


@around_the_kernel
def test_autocast_changes_nothing(problem) -> None:
    logits, target, _ = problem((5, 20))
    expected = cross_entropy(logits, target)
    with torch.autocast(logits.device.type, torch.bfloat16):
        assert torch.equal(cross_entropy(logits, target), expected)


@around_the_kernel
@pytest.mark.parametrize("reuse", [False, True])
def test_checkpointed(reuse, problem) -> None:
    x, target, _ = problem((5, 20))
    run = lambda x: cross_entropy(x * 2, target, reuse_logits=reuse)  # noqa: E731
    expected = torch.autograd.grad(run(x.requires_grad_()), x)
    assert torch.equal(*expected, *torch.autograd.grad(checkpoint(run, x, use_reentrant=False), x))


@around_the_kernel
def test_targets_of_any_strides(problem) -> None:
    logits, _, _ = problem((6, 20))
    target = torch.randint(20, (12,), device=logits.device)[::2]
    for given in (target, target[:1].expand(6)):
        expected = cross_entropy(logits, given.contiguous(), reduction="none")
        assert torch.equal(cross_entropy(logits, given, reduction="none"), expected)


def test_all_rows_ignored(problem) -> None:
    logits, target, options = problem((5, 20), options={"weight": True})
    logits.requires_grad_()
    target.fill_(-100)
    for reduction, expected in {"sum": 0.0, "mean": float("nan")}.items():
        for given in ({}, options):
            loss = cross_entropy(logits, target, reduction=reduction, **given)
            torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
            assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("shape", [(0, 20), (2, 0, 20)], ids=str)
def test_no_rows(shape, device, poisoned) -> None:
    logits = torch.randn(shape, device=device, requires_grad=True)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    loss = cross_entropy(logits, target, reduction="sum")
    loss.backward()
    assert loss == 0 and logits.grad.shape == shape
    assert cross_entropy(logits, target, reduction="none").shape == shape[:-1]
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy_with_predictions(logits, target).predictions.shape == shape[:-1]


def test_a_single_row_without_axes(device) -> None:
    logits, target = torch.randn(30, device=device), torch.tensor(3, device=device)
    torch.testing.assert_close(cross_entropy(logits, target), functional.cross_entropy(logits, target))
    assert cross_entropy(logits, target, reduction="none").shape == ()


@pytest.mark.parametrize("scale", [1e-4, 1e3, 1e15])
def test_extreme_logits(scale, problem, compare) -> None:
    logits, target, _ = problem((6, 300))
    compare(lambda z: cross_entropy(z, target), lambda z: plain(z, target), [scale * logits])


def test_masked_part_of_the_vocabulary(device) -> None:
    """Logits of -inf, whole parts of a row too."""
    logits, target = torch.randn(2, 20000, device=device), torch.tensor([15000, 10000], device=device)
    logits[:, :10000] = -torch.inf
    logits.requires_grad_()
    loss, kept = cross_entropy(logits, target), logits.detach()[:, 10000:].requires_grad_()
    expected = plain(kept, target - 10000)
    torch.testing.assert_close(loss, expected)
    (dlogits,), (dkept,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, kept)
    assert not dlogits[:, :10000].any()
    torch.testing.assert_close(dlogits[:, 10000:], dkept)


@pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)  # NumPy's, in the interpreter
@pytest.mark.parametrize("classes", [300, 5001])
def test_predictions_of_rows_that_are_not_finite(classes, device) -> None:
    """The first NaN, as `argmax` has it; within one part of a row, and in the last one."""
    logits = torch.randn(8, classes, device=device)
    logits[0, 7] = logits[1, -3] = logits[2, 4:9] = logits[3, 2] = torch.nan
    logits[2, -1] = torch.nan
    logits[3, :2] = logits[4, 5:7] = logits[4, -2] = torch.inf
    logits[5] = -torch.inf
    logits[6, :-1] = -torch.inf
    logits[7] = torch.nan
    target = torch.zeros(8, dtype=torch.int64, device=device)
    expected = logits.argmax(-1)
    assert torch.equal(cross_entropy_with_predictions(logits, target).predictions, expected)
    half = classes // 2
    parts = [
        partial_statistics(z, target, Options(-100, 0.0, 0.0, 0.0), Columns(start, classes), predict=True)
        for start, z in ((0, _padded(logits[:, :half])), (half, _padded(logits[:, half:])))
    ]
    combined = Statistics.combined(Statistics(*map(torch.stack, zip(*(part[:5] for part in parts), strict=True))))
    assert torch.equal(combined.prediction, expected)
    assert losses_of(combined, target, Options(-100, 0.0, 0.0, 0.0)).isnan().tolist() == [
        *[True] * 6, False, True
    ]  # fmt: skip


def _padded(z: Tensor) -> Tensor:
    """In rows as the kernels want them for parts of the vocabulary."""
    return z.new_zeros(z.shape[0], padded_width(z.shape[1]))[:, : z.shape[1]].copy_(z)


@pytest.mark.parametrize("wrong", [20, -1, 2**40])
def test_target_outside_the_vocabulary(wrong, problem) -> None:
    logits, target, _ = problem((5, 20))
    target[2] = wrong
    if takes_kernel(logits):
        losses = cross_entropy(logits.requires_grad_(), target, reduction="none")
        assert losses.isnan().tolist() == [False, False, True, False, False]
        (dlogits,) = torch.autograd.grad(cross_entropy(logits, target, reduction="sum"), logits)
        assert dlogits.isnan().any(1).tolist() == [False, False, True, False, False]
    else:
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            cross_entropy(logits, target)


@around_the_kernel
def test_shapes_of_a_run_share_their_kernels() -> None:
    """Neither the number of rows nor the layout of the batch is compiled for; a vocabulary is."""

    def step(*shape: int) -> None:
        logits = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        cross_entropy(logits, torch.zeros(shape[:-1], dtype=torch.int64, device="meta")).backward()

    plans = [record(functools.partial(step, *shape)) for shape in ((4, 512, 32000), (8191, 32000), (1, 33, 32000))]
    assert plans[0] == plans[1] == plans[2]
    assert [each.name for each in plans[0].specializations] == [
        "divisor_kernel",
        "cross_entropy_kernel",
        "total_kernel",
        "multiply_kernel",
    ]
    assert len(plans[0] + record(functools.partial(step, 64, 128256))) == len(plans[0]) + 1
    # Triton looks a kernel up by its options in the order of the launch.
    assert [name for name, _ in plans[0].specializations[1].options] == ["enable_fp_fusion", "num_warps", "maxnreg"]


def test_more_rows_than_32_bits_index_are_refused() -> None:
    logits = torch.empty(2**30, 2, dtype=torch.bfloat16, device="meta")
    with recording(), pytest.raises(ValueError, match="too many for a 32-bit index: split them"):
        cross_entropy(logits, torch.zeros(2**30, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("classes", [7, 32000, 262208, 10**6])
def test_a_program_waits_only_for_those_before_it(classes) -> None:
    with recording() as calls:
        logits = torch.empty(3, classes, dtype=torch.bfloat16, device="meta", requires_grad=True)
        cross_entropy(logits, torch.zeros(3, dtype=torch.int64, device="meta"), reduction="sum")
    (call,) = (call for call in calls if call.kernel.__name__ == "cross_entropy_kernel")
    distance = dict(zip(call.kernel.arg_names, call.args, strict=False))["distance"]
    assert distance >= call.kwargs["PARTS"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("cut", "offset", "options"),
    [
        *((cut, 0.0, options) for cut in (300, 4999) for options in ((-100, 0.0, 0.0, 0.0), (-100, 0.2, 0.02, 3.0))),
        (300, 1e6, (-100, 0.2, 0.02, 0.0)),
    ],
)
def test_shards_of_the_vocabulary(cut, offset, weighted, options, device, within_bar) -> None:
    total = 700 if cut == 300 else 9700
    options, bounds = Options(*options), ((0, cut), (cut, total))
    logits, target = offset + 2 * torch.randn(5, total, device=device), torch.randint(total, (5,), device=device)
    target[1] = -100
    weight = torch.rand(total, device=device) if weighted else None
    scale = torch.rand(5, device=device)

    def whole(z: Tensor) -> list[Tensor]:
        given = None if weight is None else weight.to(z.dtype)
        z = z.clone().requires_grad_()
        losses = plain(
            z, target, weight=given, label_smoothing=options.label_smoothing, z_loss=options.z_loss,
            softcap=options.softcap or None, reduction="none",
        )  # fmt: skip
        return [losses.detach(), *torch.autograd.grad(losses, z, scale.to(z.dtype))]

    buffers = [_padded(logits[:, a:b]) for a, b in bounds]
    weights = [None if weight is None else weight[a:b].contiguous() for a, b in bounds]
    parts = [
        partial_statistics(z, target, options, Columns(a, total), weight=w, predict=True)
        for z, w, (a, _) in zip(buffers, weights, bounds, strict=True)
    ]
    combined = Statistics.combined(Statistics(*map(torch.stack, zip(*(part[:5] for part in parts), strict=True))))
    losses = losses_of(combined, target, options)
    for z, w, (a, _) in zip(buffers, weights, bounds, strict=True):
        partial_gradient(z, target, scale, combined, options, Columns(a, total), weight=w)
    for ours, theirs, exact in zip((losses, torch.cat(buffers, 1)), whole(logits), whole(logits.double()), strict=True):
        within_bar(ours, theirs, exact)
    assert torch.equal(combined.prediction, logits.argmax(1).where(target != -100, -1))


Z, T, W = torch.ones(3, 5), torch.zeros(3, dtype=torch.int64), torch.ones(5)


@around_the_kernel
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Z.int(), T), {}, "logits must be bf16, fp16, fp32, fp64 of shape .* got int32"),
        ((Z[:, :0], T), {}, "V > 0"),
        ((Z.sum(), T), {}, "logits must be"),
        ((Z, T[:2]), {}, r"target int64 \[2\] must be int64 \[3\]"),
        ((Z, T.int()), {}, r"target int32 \[3\] must be int64 \[3\]"),
        ((Z, T.to("meta")), {}, "on one device"),
        ((Z, T), {"weight": W[:3]}, r"weight must be .* of shape \[5\], got float32 \[3\]"),
        ((Z, T), {"weight": W.int()}, "weight must be"),
        ((Z, T), {"weight": W.to("meta")}, "on one device"),
        ((Z, T), {"weight": W.clone().requires_grad_()}, "weight gets no gradient: detach it"),
        ((Z, T), {"label_smoothing": 1.5}, "label_smoothing 1.5 must be between 0 and 1"),
        ((Z, T), {"softcap": 0.0}, "softcap 0.0 must be positive"),
        ((Z, T), {"reduction": "avg"}, "reduction 'avg' must be one of mean, sum, none"),
        ((Z, T), {"reduction": "sum", "num_items": 3}, "reduction 'sum' has no divisor"),
        ((Z, T), {"num_items": torch.ones(2)}, "must have one element"),
    ],
)
def test_wrong_arguments(arguments, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(*arguments, **options)
