"""linear_jsd, linear_kl_div and linear_topk_kl_div against PyTorch in the same dtype and in fp64."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import (
    linear_cosine_distance,
    linear_distillation,
    linear_jsd,
    linear_kl_div,
    linear_topk_kl_div,
)
from strata_kernels.ops.head import head_pass, memory
from strata_kernels.ops.linear_divergence import row_divergences
from tests.kernels.test_divergence import compare, hold_loss, log_probs, plain, reduced

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
INTERPRETED = "TRITON_INTERPRET" in os.environ
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows, vocabulary, features of the student and of the teacher.
SHAPES = [(1, 7, 33, 20), (33, 300, 17, 40), (5, 5001, 9, 9)]
FULL = [(513, 128256, 256, 512)] if torch.cuda.is_available() else []
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "forward": (linear_kl_div, lambda p, q: plain("forward", p, q)),
    "reverse": (lambda *x, **o: linear_kl_div(*x, direction="reverse", **o), lambda p, q: plain("reverse", p, q)),
    "jsd": (linear_jsd, lambda p, q: plain("jsd", p, q)),
    "jsd 0.1": (lambda *x, **o: linear_jsd(*x, beta=0.1, **o), lambda p, q: plain("jsd", p, q, 0.1)),
}


class Problem:
    """x, weight and bias of the student, those of a teacher near it, and targets of which every fourth is ignored."""

    def __init__(
        self, rows: int, vocabulary: int, hidden: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        x, weight, bias = torch.randn(rows, hidden), 2 * hidden**-0.5 * torch.randn(vocabulary, hidden), None
        bias = torch.randn(vocabulary)
        head = torch.randn(vocabulary, width) * width**-0.5
        self.student = [t.to(device, dtype) for t in (x, weight, bias)]
        self.teacher = [t.to(device, dtype) for t in (torch.randn(rows, width), head)]
        self.target = torch.randint(vocabulary, (rows,), device=device)
        self.target[1::4] = -100


@pytest.fixture
def compare_trained(within_bar: Callable[..., None], path: str) -> Callable[..., None]:
    """Results and gradients at the bar, for an incoming gradient of one, as a training step has it."""

    def run(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], inputs: list[Tensor]) -> None:
        losses, gradients = compare(ours, torchs, inputs, path)
        # In fp16 a gradient is divided by the number of rows after it is stored, for the sake of a loss scale.
        roundings = 2 if inputs[0].dtype == torch.float16 else 1
        hold_loss(*losses)
        for each in gradients:
            within_bar(*each, roundings)

    return run


def squashed(z: Tensor, softcap: float | None) -> Tensor:
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return softcap * torch.tanh(z / softcap) if softcap else z


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *FULL], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "softcap": 3.0, "teacher_softcap": 5.0}, {"num_items": 5}], ids=str
)
@pytest.mark.parametrize("kind", LOSSES)
def test_matches_fp64(kind, options, shape, dtype, path, device, compare_trained, poisoned) -> None:
    if shape in FULL and path != "gpu":
        pytest.skip("a size for a GPU")
    given = Problem(*shape, device, dtype)
    ours, losses = LOSSES[kind]
    temperature = options.get("temperature", 1.0)
    budget = 2**16 if shape in SHAPES else 2**27

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = squashed(functional.linear(x, weight, bias), options.get("softcap"))
        t = squashed(functional.linear(*(y.to(x.dtype) for y in given.teacher)), options.get("teacher_softcap"))
        found = losses(log_probs(z, temperature), log_probs(t, temperature))
        return reduced(found, given.target, num_items=options.get("num_items"))

    compare_trained(
        lambda x, w, b: ours(x, w, *given.teacher, given.target, bias=b, **options, chunk_bytes=budget),
        torchs, given.student,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"num_items": 5}], ids=str)
def test_cosine_matches_fp64(options, shape, dtype, device, compare_trained, poisoned) -> None:
    given = Problem(*shape, device, dtype)
    teacher_bias = torch.randn(shape[1], device=device, dtype=dtype)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        z = functional.linear(x, weight, bias).to(wide)
        t = functional.linear(*(y.to(x.dtype) for y in (*given.teacher, teacher_bias))).to(wide)
        return reduced(1 - functional.cosine_similarity(z, t), given.target, num_items=options.get("num_items"))

    compare_trained(
        lambda x, w, b: linear_cosine_distance(
            x, w, *given.teacher, given.target, bias=b, teacher_bias=teacher_bias, **options, chunk_bytes=2**16
        ),
        torchs, given.student,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 11, 33, 20), (36, 300, 17, 40), SHAPES[2], *FULL], ids=str)
@pytest.mark.parametrize(
    ("options", "classes"),
    [
        ({}, 0),
        ({"num_items": 5}, -2),
        ({}, 2),
        ({"beta": 0.3, "temperature": 2.0, "softcap": 3.0}, -2),
        ({"label_weight": 0.0}, -2),
    ],
    ids=str,
)
def test_distillation_matches_fp64(options, classes, shape, dtype, path, device, compare_trained, poisoned) -> None:
    """Both parts from one pass, also where the vocabularies are padded to different sizes."""
    if shape in FULL and path != "gpu":
        pytest.skip("a size for a GPU")
    given = Problem(*shape, device, dtype)
    head = torch.randn(shape[1] + classes, shape[3], device=device).mul(shape[3] ** -0.5).to(dtype)
    both, kind = min(head.shape[0], shape[1]), "jsd" if "beta" in options else "forward"
    weights = options.get("label_weight", 0.5), 0.7

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = squashed(functional.linear(x, weight, bias), options.get("softcap"))
        t = functional.linear(given.teacher[0].to(x.dtype), head.to(x.dtype)).to(z.dtype)
        found = [log_probs(y[:, :both], options.get("temperature", 1.0)) for y in (z, t)]
        entropy = functional.cross_entropy(z, given.target, reduction="none")
        rows = weights[0] * entropy + weights[1] * plain(kind, *found, options.get("beta", 0.5))
        return reduced(rows, given.target, num_items=options.get("num_items"))

    budget = 2**27 if shape in FULL else 2**16
    compare_trained(
        lambda x, w, b: linear_distillation(
            x, w, given.teacher[0], head, given.target, bias=b, divergence_weight=0.7, **options, chunk_bytes=budget
        ).loss,
        torchs, given.student,
    )  # fmt: skip


def test_parts_of_distillation_are_those_of_its_functions(device) -> None:
    """Without their weights, and without gradient; so are more rows than were told."""
    given = Problem(12, 40, 8, 12, device, torch.float32)
    x, weight, bias = given.student
    for options in ({}, {"max_targets": 9}):
        loss, entropy, divergence = linear_distillation(
            x, weight.requires_grad_(), *given.teacher, given.target, beta=0.3, temperature=2.0, bias=bias, **options
        )
        assert loss.requires_grad and not entropy.requires_grad and not divergence.requires_grad
        z, t = functional.linear(x, weight, bias), functional.linear(*given.teacher)
        rows = plain("jsd", log_probs(z, 2.0), log_probs(t, 2.0), 0.3)
        torch.testing.assert_close(entropy, functional.cross_entropy(z, given.target))
        torch.testing.assert_close(divergence, reduced(rows, given.target))
        torch.testing.assert_close(loss, (entropy + divergence) / 2)
    terms = linear_distillation(x, weight, *given.teacher, given.target, bias=bias, max_targets=8)
    assert all(term.isnan() for term in terms)
    with pytest.raises(ValueError, match=r"beta 1.5 must be between 0 and 1"):
        linear_distillation(x, weight, *given.teacher, given.target, beta=1.5)
    with pytest.raises(ValueError, match=r"teacher_x .* must have the leading shape of x"):
        linear_distillation(x, weight, given.teacher[0][1:], given.teacher[1], given.target)


def test_cosine_of_a_row_of_zeros(device) -> None:
    x, weight = torch.zeros(2, 3, device=device), torch.eye(3, device=device)
    x[1, 0] = 1.0
    teacher = torch.ones(2, 3, device=device)
    found = []
    for function in (
        lambda x: linear_cosine_distance(x, weight, teacher, weight),
        lambda x: (1 - functional.cosine_similarity(x, teacher)).mean(),
    ):
        leaf = x.clone().requires_grad_()
        loss = function(leaf)
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def topk(given: Problem, k: int) -> tuple[Tensor, Tensor]:
    """(tokens, log-probabilities) of the teacher's likeliest."""
    values, tokens = log_probs(functional.linear(*given.teacher).float()).topk(k)
    return tokens, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "softcap": 3.0}, {"num_items": 5}], ids=str)
def test_topk_matches_fp64(options, shape, dtype, device, compare_trained, poisoned) -> None:
    given = Problem(*shape, device, dtype)
    tokens, told = topk(given, min(5, shape[1]))
    told[0, -1] = -torch.inf

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = squashed(functional.linear(x, weight, bias), options.get("softcap"))
        log_p = log_probs(z, options.get("temperature", 1.0)).gather(1, tokens)
        terms = told.exp() * (told - log_p).masked_fill(told == -torch.inf, 0.0)
        return reduced(terms.sum(1), given.target, num_items=options.get("num_items"))

    compare_trained(
        lambda x, w, b: linear_topk_kl_div(
            x, w, tokens, told, given.target, bias=b, **options, chunk_bytes=2**15
        ),
        torchs, given.student,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [29, 48], ids=["panels in dW", "panels beside it"])
@pytest.mark.parametrize("name", ["jsd", "topk"])
def test_chunks_round_a_16_bit_gradient_of_weight_once(name, rows, device, monkeypatch, poisoned) -> None:
    """Ten chunks are as one of all rows, whose products alone PyTorch would round as well."""
    if INTERPRETED:
        pytest.skip("the interpreter computes bf16 wrongly")
    monkeypatch.setattr(memory, "_PANEL_COLUMNS", 64)
    given = Problem(rows, 300, 32, 12, device, torch.bfloat16)
    plans, plan = [], memory.plan_chunks
    monkeypatch.setattr(row_divergences, "plan_chunks", lambda *a, **o: plans.append(plan(*a, **o)) or plans[-1])
    found = []
    for budget in (8 * 2 * 320 * 2, 2**30):
        leaves = [t.detach().requires_grad_() for t in given.student]
        loss = everything(given)[name](*leaves, chunk_bytes=budget)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert plans[0].panels_size is not None and plans[0].chunk_rows < rows / 2
    assert plans[1].panels_size is None and not plans[1].fp32_dw
    for chunked, whole in zip(*found, strict=True):
        # Only the order in which fp32 sums go differs: the largest are neighbors at most.
        assert (chunked.double() - whole.double()).abs().max() <= 2 ** (whole.double().abs().max().log2().floor() - 7)


def test_a_large_head_takes_less_than_two_gibibytes() -> None:
    """Student and teacher of 4096 rows with 128256 classes: dW, dx, both logits and what no panel of dW holds."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    plan = memory.plan_chunks(x, torch.Size((128256, 4096)), True, True, 2**30, tensors=2)
    assert not plan.fp32_dw and plan.panels_size is not None
    assert 2 * (128256 * 4096 + 4096 * 4096 + 2 * plan.buffer_size + plan.panels_size) < 1.75 * 2**30
    # Twice as many rows as features take no more than chunks and an fp32 sum; still more rows take that sum.
    twice, many = (
        memory.plan_chunks(x.new_empty(rows, 4096), torch.Size((128256, 4096)), True, True, 2**30, tensors=2)
        for rows in (8192, 16384)
    )
    assert twice.panels_size is not None and 2 * (2 * twice.buffer_size + twice.panels_size) < 2**30 + 2 * 128256 * 4096
    assert many.fp32_dw and many.panels_size is None


def test_topk_of_all_tokens_is_the_divergence(device, gradients) -> None:
    given = Problem(9, 40, 8, 12, device, torch.float32)
    tokens, told = topk(given, 40)
    pairs = zip(
        gradients(lambda x, w, b: linear_topk_kl_div(x, w, tokens, told, given.target, bias=b), given.student),
        gradients(lambda x, w, b: linear_kl_div(x, w, *given.teacher, given.target, bias=b), given.student),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def everything(given: Problem) -> dict[str, Callable[..., Tensor]]:
    tokens, told = topk(given, 3)

    def jsd(x: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
        return linear_jsd(x, w, *given.teacher, given.target, bias=b, **options)

    def top(x: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
        return linear_topk_kl_div(x, w, tokens, told, given.target, bias=b, **options)

    def both(x: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
        return linear_distillation(x, w, *given.teacher, given.target, bias=b, beta=0.5, **options).loss

    return {"jsd": jsd, "topk": top, "both": both}


@pytest.mark.parametrize("name", ["jsd", "topk", "both"])
def test_compiled_equals_eager(name, device, gradients) -> None:
    given = Problem(7, 30, 8, 12, device, torch.float32)
    function = lambda x, w, b: everything(given)[name](x.sin(), w, b, temperature=0.8).cos()  # noqa: E731
    call = everything(given)[name]
    function = lambda x, w, b: call(x.sin(), w, b, temperature=0.8).cos()  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(function, given.student), gradients(compiled, given.student), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["jsd", "topk", "both"])
def test_runs_repeat_and_a_frozen_head_saves_a_product(name, device, monkeypatch) -> None:
    given = Problem(6, 20, 8, 12, device, torch.float32)
    call, flops = everything(given)[name], []

    def counting(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            a, b = args[-2:]
            flops.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return product(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "mm", counting(torch.mm))
    monkeypatch.setattr(torch, "addmm", counting(torch.addmm))
    x, weight, _ = given.student
    found = []
    for frozen, products in ((False, 6), (False, 6), (True, 4)):
        flops.clear()
        leaves = [x.requires_grad_(), weight.detach().requires_grad_(not frozen)]
        loss = call(*leaves, None)
        found.append([loss, *torch.autograd.grad(loss, leaves[: 2 - frozen])])
        teacher = 0 if name == "topk" else 2 * 6 * 20 * 12
        assert sum(flops) == products * 6 * 20 * 8 + teacher
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize("name", ["jsd", "topk", "both"])
def test_ignored_rows_are_dropped(name, device, gradients, monkeypatch) -> None:
    """Nine of twelve rows are not ignored."""
    given = Problem(12, 40, 8, 12, device, torch.float32)
    call, sizes = everything(given)[name], []
    run = head_pass.HeadPass.__init__
    monkeypatch.setattr(
        head_pass.HeadPass, "__init__", lambda self, x, *rest, **by: sizes.append(len(x)) or run(self, x, *rest, **by)
    )
    kept, whole = (gradients(lambda *t, m=m: call(*t, max_targets=m), given.student) for m in (9, None))
    assert sizes == [9, 12]
    for a, b in zip(kept, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert call(*given.student, max_targets=8).isnan()


@pytest.mark.parametrize("name", ["jsd", "topk", "both"])
def test_fp64_is_differentiated_exactly(name, device) -> None:
    given = Problem(5, 8, 3, 4, device, torch.float64)
    call = everything(given)[name]
    leaves = [t.requires_grad_() for t in given.student]
    assert torch.autograd.gradcheck(lambda *t: call(*t, temperature=1.5, softcap=3.0), leaves)


@pytest.mark.parametrize("name", ["jsd", "topk", "both"])
def test_transforms_of_functions_see_plain_pytorch(name, device) -> None:
    given = Problem(5, 8, 3, 4, device, torch.float32)
    call = everything(given)[name]
    ours = torch.func.grad(lambda *t: call(*t, temperature=1.5), argnums=(0, 1, 2))(*given.student)
    leaves = [t.requires_grad_() for t in given.student]
    expected = torch.autograd.grad(call(*leaves, temperature=1.5), leaves)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["jsd", "topk"])
def test_sequences_and_no_rows(name, device) -> None:
    given = Problem(6, 20, 8, 12, device, torch.float32)
    x, weight, _ = given.student
    tokens, told = topk(given, 3)
    shaped = [t.view(2, 3, -1) for t in ((given.teacher[0],) if name == "jsd" else (tokens, told))]
    function = linear_jsd if name == "jsd" else linear_topk_kl_div
    more = given.teacher[1:] if name == "jsd" else []
    rest = given.teacher if name == "jsd" else [tokens, told]
    torch.testing.assert_close(
        function(x.view(2, 3, 8), weight, *shaped, *more, given.target.view(2, 3)),
        function(x, weight, *rest, given.target),
    )
    none = function(x[:0], weight.requires_grad_(), *(t[:0] for t in rest[: 1 + (name != "jsd")]), *more)
    assert none.isnan() and not torch.autograd.grad(none, weight)[0].any()


@pytest.mark.parametrize("name", ["jsd", "topk"])
def test_wrong_arguments(name, device) -> None:
    given = Problem(6, 20, 8, 12, device, torch.float32)
    call = everything(given)[name]
    for options, message in (
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"softcap": -1.0}, "softcap -1.0 must be positive"),
        ({"reduction": "none"}, "must be mean or sum"),
        ({"accumulate": "fast"}, "one of exact, lean"),
        ({"reduction": "sum", "num_items": 3}, "has no divisor"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*given.student, **options)
    x, weight, _ = given.student
    teacher_x, head = given.teacher
    tokens, told = topk(given, 3)
    for function, arguments, message in (
        (linear_jsd, (x, weight, teacher_x, head[:19]), "pass the rows that both have"),
        (linear_jsd, (x, weight, teacher_x[:5], head), "the leading shape of x"),
        (linear_jsd, (x, weight, teacher_x.double(), head.double()), "cast one of them"),
        (linear_jsd, (x, weight, teacher_x, head.clone().requires_grad_()), "get no gradient"),
        (linear_topk_kl_div, (x, weight, tokens.int(), told), "must be int64"),
        (linear_topk_kl_div, (x, weight, tokens[:5], told[:5]), "the leading shape of x"),
        (linear_topk_kl_div, (x, weight, tokens, told.clone().requires_grad_()), "detach it"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
