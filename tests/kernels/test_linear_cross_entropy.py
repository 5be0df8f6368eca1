"""linear_cross_entropy against PyTorch in the same dtype and in fp64."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strata_kernels import linear_cross_entropy, linear_cross_entropy_with_predictions
from strata_kernels.ops import linear_cross_entropy as operators
from strata_kernels.ops._launch import takes_kernel
from strata_kernels.ops.cross_entropy.row_statistics import Options
from strata_kernels.ops.cross_entropy.rows import cross_entropy_rows
from strata_kernels.ops.head import head_pass, memory
from strata_kernels.ops.head.memory import plan_rows
from strata_kernels.patch.forwards import _causal_lm_loss as causal_lm_loss

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
INTERPRETED = "TRITON_INTERPRET" in os.environ

# The matrix products around the kernel are PyTorch's; the kernel itself computes in fp32, which is slow to emulate.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows, vocabulary, features: one row, odd sizes, one part, several; more than one block of the vocabulary.
SHAPES = [(1, 7, 301), (7, 130, 33), (33, 300, 17), (2, 20000, 5)]
FULL = []
if torch.cuda.is_available():
    FULL = [(513, 128256, 768), (2000, 50257, 520), (4096, 32000, 1024), (1111, 262208, 256)]
CLASSES = "as many random weights as there are classes"
ROWS = "as many random weights as there are rows"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 2.0},
    "class weights": {"class_weight": CLASSES, "label_smoothing": 0.1},
    "all": {
        "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "ignore_index": 2, "class_weight": CLASSES,
        "row_weight": ROWS,
    },
    "items": {"num_items": 5},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "row_weight": ROWS},
    "none": {"reduction": "none", "z_loss": 0.01, "row_weight": ROWS},
}  # fmt: skip


def plain(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    row_weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: str = "mean", num_items: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    z = functional.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)).flatten(0, -2)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    target, valid = target.flatten(), target.flatten() != ignore_index
    classes = None if class_weight is None else class_weight.to(z.dtype)
    loss = functional.cross_entropy(
        z, target, classes, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    loss = loss + z_loss * z.logsumexp(-1).square() * valid
    if row_weight is not None:
        loss = loss * row_weight.flatten().to(z.dtype)
    if reduction == "none":
        return loss.view(x.shape[:-1])
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (
        (valid if classes is None else classes[target[valid]]).sum() if num_items is None else num_items
    )


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


def filled(options: dict[str, Any], rows: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """The options with weights of classes and rows where there are to be some."""
    weights = {CLASSES: torch.rand(vocabulary), ROWS: torch.rand(rows)}
    return {key: weights[value].to(device) if value in (CLASSES, ROWS) else value for key, value in options.items()}


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that is cut by size is cut at sizes of these tests."""
    monkeypatch.setattr(memory, "_PANEL_COLUMNS", 64)
    monkeypatch.setattr(memory, "_COPIED_ROWS", 16)
    monkeypatch.setattr(head_pass, "_L2_COLUMNS", 32)
    plan_rows.cache_clear()
    yield
    plan_rows.cache_clear()


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
@pytest.mark.parametrize("shape", [*SHAPES, *FULL], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_fp64(options, shape, dtype, path, problem, compare_trained, poisoned) -> None:
    if shape in FULL and path != "gpu":
        pytest.skip("a size for a GPU")
    rows, vocabulary, _ = shape
    inputs, target = problem(*shape, dtype, options.get("ignore_index", -100))
    options = filled(options, rows, vocabulary, target.device)

    def call(function: Callable[..., Tensor], **given: int) -> Callable[..., Tensor]:
        return lambda x, weight: function(x, weight, target, **options, **given)

    # A few rows at a time in the buffer, or all in panels.
    compare_trained(call(linear_cross_entropy, chunk_bytes=2**15 if rows < 100 else 2**26), call(plain), inputs[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["all"] if INTERPRETED else ["smoothing", "all", "none"])
@pytest.mark.parametrize("rows", [4, 10])
def test_logits_in_panels_match_fp64(rows, options, dtype, problem, compare_trained, small_panels, poisoned) -> None:
    """Four rows find room in the memory of dW and a panel beside it; ten need more beside it."""
    inputs, target = problem(rows, 150, 8, dtype, OPTIONS[options].get("ignore_index", -100))
    given = filled(OPTIONS[options], rows, 150, target.device)
    budget = 150 * rows * inputs[0].itemsize
    assert plan_rows(rows, 150, 8, inputs[0].itemsize, True, True, budget).in_panels

    def call(function: Callable[..., Tensor], **chunks: int) -> Callable[..., Tensor]:
        return lambda x, weight, bias: function(x, weight, target, bias=bias, **given, **chunks)

    compare_trained(call(linear_cross_entropy, chunk_bytes=budget), call(plain), inputs)
    frozen = [inputs[0].requires_grad_(), *(t.detach() for t in inputs[1:])]
    whole, parts = (call(linear_cross_entropy, **c)(*frozen).sum() for c in ({}, {"chunk_bytes": budget}))
    # The products of fewer rows add up in another order.
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    for a, b in zip(*(torch.autograd.grad(loss, frozen[:1]) for loss in (whole, parts)), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["none"]], ids=["mean", "none"])
def test_incoming_gradient(options, dtype, problem, compare, poisoned) -> None:
    inputs, target = problem(16, 200, 64, dtype)
    options = filled(options, 16, 200, target.device)

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
    options = filled(options, 9, 50, target.device)

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight, bias: function(x, weight, target, bias=bias, **options)

    compare_trained(call(linear_cross_entropy), call(plain), inputs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_runs_repeat_bit_for_bit(reduction, problem, gradients, small_panels) -> None:
    inputs, target = problem(10, 150, 8)
    function = lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction, chunk_bytes=6000)  # noqa: E731
    first, second = (gradients(function, inputs[:2]) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5, 1e6])
@pytest.mark.parametrize("in_panels", [True, False], ids=["panels", "chunks"])
def test_logits_far_from_zero(in_panels, offset, device, compare_trained, small_panels) -> None:
    """Logits that fp32 holds exactly, whatever is added up first: small integers times sixteenths."""
    x = torch.randint(-2, 3, (6, 8), device=device).float()
    weight = torch.randint(-8, 9, (150, 8), device=device) / 16
    bias = torch.full((150,), offset, device=device)
    target = torch.randint(150, (6,), device=device)
    budget = 150 * 6 * 4 if in_panels else 2**30
    assert plan_rows(6, 150, 8, 4, True, True, budget).in_panels == in_panels

    def call(function: Callable[..., Tensor], **chunks: int) -> Callable[..., Tensor]:
        return lambda x, weight, bias: function(x, weight, target, bias=bias, label_smoothing=0.1, **chunks)

    compare_trained(call(linear_cross_entropy, chunk_bytes=budget), call(plain), [x, weight, bias])


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


@pytest.mark.skipif(INTERPRETED, reason="what is tested is around the kernel")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(problem) -> None:
    (x, weight, bias), target = problem(6, 20, 8)
    settings = (-100, 0.1, 0.01, 2.0, 0.5, 2**20, True, True, True, "", 1, 0, 20, False, True, True, True)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    data, rest = [t.detach() for t in leaves], (target, torch.rand(20).to(x), *settings)
    weights = (torch.tensor(3.0).to(x), torch.rand(6).to(x))
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy.default, (*weights, *leaves, *rest))
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy_rows.default, (*leaves, *rest))
    statistics = (torch.rand(6).to(x) for _ in range(4))
    grads, inputs = (data[0][:, 0], data[0][:, 1]), (*data, *rest[:2], *statistics, *settings)
    torch.library.opcheck(torch.ops.strata.linear_cross_entropy_rows_bwd.default, (*grads, *inputs))


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
    assert outputs.shapes[1:] == [(5, 8) if trained[0] else (0,), (20, 8) if trained[1] else (0,), (0,), (0,)]
    with Outputs() as outputs, torch.no_grad():
        linear_cross_entropy(x, weight, target, bias=bias)
    assert outputs.shapes[1:] == [(0,)] * 4


def test_a_frozen_head_saves_a_product(problem, monkeypatch) -> None:
    (x, weight, _), target = problem(6, 20, 8)
    counts = []

    def counting(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            a, b = args[-2:]
            counts.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return product(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "mm", counting(torch.mm))
    monkeypatch.setattr(torch, "addmm", counting(torch.addmm))
    for frozen, products in ((False, 6), (True, 4)):
        counts.clear()
        linear_cross_entropy(x.requires_grad_(), weight.detach().requires_grad_(not frozen), target).backward()
        assert sum(counts) == products * 6 * 20 * 8


@pytest.mark.parametrize("factor", [1.0, 0.3337])
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
    run = operators.losses_and_gradients
    monkeypatch.setattr(
        operators, "losses_and_gradients", lambda *args: addresses.append((r := run(*args))[1].dw.data_ptr()) or r
    )
    linear_cross_entropy(x, weight.requires_grad_(), target).backward()
    assert takes_kernel(x) == (addresses == [weight.grad.data_ptr()])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_tied_head_under_activation_checkpointing(reduction, problem) -> None:
    """The weight is used twice, and the forward pass runs twice."""
    (_, weight, _), target = problem(6, 20, 8)
    tokens = torch.arange(6, device=target.device)
    found = []
    for function in (linear_cross_entropy, plain):
        leaf = weight.detach().requires_grad_()
        step = lambda w: function(w[tokens].tanh(), w, target, reduction=reduction)  # noqa: B023, E731
        loss = checkpoint(step, leaf, use_reentrant=False)
        found.append(torch.autograd.grad(loss.sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_a_patched_model_drops_the_rows_that_its_batch_names(problem, monkeypatch) -> None:
    sizes = []
    run = head_pass.HeadPass.__init__
    monkeypatch.setattr(
        head_pass.HeadPass, "__init__", lambda self, x, *rest, **by: sizes.append(len(x)) or run(self, x, *rest, **by)
    )
    (x, weight, _), labels = problem(12, 40, 8)
    losses = [
        causal_lm_loss(x[None], weight, None, labels[None], softcap=None, **batch)
        for batch in ({}, {"max_targets": int((labels[1:] != -100).sum())})
    ]
    assert sizes == [12, 8]
    torch.testing.assert_close(*losses)


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


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for the device: a number for the host, or a size that hangs on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, OPTIONS["all"], OPTIONS["none"]], ids=["mean", "all", "none"])
@pytest.mark.parametrize("most", [9] if INTERPRETED else [9, 11, 20])
def test_ignored_rows_are_dropped(most, options, dtype, problem, gradients, monkeypatch) -> None:
    """Nine of twelve rows are not ignored."""
    inputs, target = problem(12, 40, 8, dtype, options.get("ignore_index", -100))
    options = filled(options, 12, 40, target.device)
    sizes = []
    run = head_pass.HeadPass.__init__
    monkeypatch.setattr(
        head_pass.HeadPass, "__init__", lambda self, x, *rest, **by: sizes.append(len(x)) or run(self, x, *rest, **by)
    )

    def call(**given: int) -> list[Tensor]:
        with NoWaiting():
            return gradients(lambda x, w: linear_cross_entropy(x, w, target, **options, **given), inputs[:2])

    kept = call(max_targets=most)
    assert set(sizes) == {min(most, 12)}
    # The products of fewer rows add up in another order.
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    for a, b in zip(kept, call(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))


def test_more_targets_than_announced(problem) -> None:
    (x, weight, _), target = problem(12, 40, 8)
    assert linear_cross_entropy(x, weight, target, max_targets=8).isnan()
    assert linear_cross_entropy(x, weight, target, max_targets=8, reduction="none").isnan().all()
    # A trainer that leaves a NaN out of its log must not train on the rows that are left.
    weight.requires_grad_()
    for most, reduction in ((8, "mean"), (8, "none"), (0, "sum")):
        loss = linear_cross_entropy(x, weight, target, max_targets=most, reduction=reduction).sum()
        assert torch.autograd.grad(loss, weight)[0].isnan().all()
    target.fill_(-100)
    loss = linear_cross_entropy(x, weight, target, max_targets=0, reduction="sum")
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


@pytest.mark.parametrize("options", [{}, {"max_targets": 5}, {"chunk_bytes": 2**11}, {"reduction": "none"}], ids=str)
def test_predictions(options, problem, small_panels) -> None:
    (x, weight, bias), target = problem(6, 100, 8)
    target[0] = (x @ weight.t() + bias)[0].argmax()
    leaves = [t.requires_grad_() for t in (x, weight)]
    found = linear_cross_entropy_with_predictions(*leaves, target, bias=bias, **options)
    assert torch.equal(found.predictions, (x @ weight.t() + bias).argmax(-1).where(target != -100, -1))
    counted = target != -100
    torch.testing.assert_close(found.accuracy, (found.predictions == target)[counted].float().mean())
    alone = linear_cross_entropy(*leaves, target, bias=bias, **options)
    assert torch.equal(found.loss, alone)
    for a, b in zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found.loss, alone)), strict=True):
        assert torch.equal(a, b)


def test_row_weights_do_not_enter_the_divisor(problem) -> None:
    (x, weight, _), target = problem(6, 20, 8)
    halves = torch.full((6,), 0.5, device=x.device)
    whole = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, row_weight=halves), whole / 2)
    counted = (target != -100).sum()
    weighted = linear_cross_entropy(x, weight, target, row_weight=halves, num_items=0.5 * counted)
    torch.testing.assert_close(weighted, whole)


def test_transforms_of_functions_see_plain_pytorch(problem) -> None:
    (x, weight, _), target = problem(6, 20, 8)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "row_weight": torch.rand(6, device=x.device)}
    function = lambda f: lambda x, w: f(x, w, target, **options)  # noqa: E731
    ours = torch.func.grad(function(linear_cross_entropy), argnums=(0, 1))(x, weight)
    for a, b in zip(ours, torch.func.grad(function(plain), argnums=(0, 1))(x, weight), strict=True):
        torch.testing.assert_close(a, b)
    rows = torch.func.vmap(lambda x, t: linear_cross_entropy(x[None], weight, t[None], reduction="sum"))(x, target)
    torch.testing.assert_close(rows, plain(x, weight, target, reduction="none"))


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
        ((X, W, T), {"reduction": "sum", "num_items": 3}, "reduction 'sum' has no divisor"),
        ((X, W, T), {"num_items": torch.ones(2)}, "must have one element"),
        ((X, W, T), {"accumulate": "fp32"}, "accumulate 'fp32' must be one of exact, lean"),
        ((X, W, T), {"chunk_bytes": 0}, "chunk_bytes 0 must be positive"),
        ((X, W, T), {"max_targets": -1}, "max_targets -1 must not be negative"),
        ((X, W, T), {"class_weight": torch.ones(4)}, r"class_weight float32 \[4\] must be floating point \[5\]"),
        ((X, W, T), {"row_weight": torch.ones(5)}, r"row_weight float32 \[5\] must be \[3\]"),
        ((X, W, T), {"row_weight": torch.ones(3, requires_grad=True)}, "get no gradient"),
        ((X, W, T.to("meta")), {}, "on one device"),
    ],
)
def test_wrong_arguments(arguments, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*arguments, **options)
