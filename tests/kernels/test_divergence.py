"""kl_div, jsd and tvd against PyTorch in the same dtype and in fp64, and against TRL's function."""

import importlib.util
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import jsd, kl_div, tvd
from strata_kernels.ops.divergence import divergence_rows
from strata_kernels.ops.divergence.divergence_reference import reference_divergence, reference_gradient

# The interpreter's NumPy warns of lanes whose results are masked.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
INTERPRETED = "TRITON_INTERPRET" in os.environ
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows and vocabulary: one row, odd sizes, one part of the kernel and several.
SHAPES = [(1, 7), (5, 300), (3, 9001)]
FULL = [(300, 128256), (70, 50257), (40, 262208)] if torch.cuda.is_available() else []
Function = Callable[..., Tensor]


def plain(kind: str, log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    """Losses [...] of log-probabilities, in the words of PyTorch."""
    kl = lambda of, to: functional.kl_div(to, of, reduction="none", log_target=True).sum(-1)  # noqa: E731
    if kind == "forward":
        return kl(log_q, log_p)
    if kind == "reverse":
        return kl(log_p, log_q)
    if kind == "tvd":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    log_m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


KINDS: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "forward": (kl_div, lambda p, q: plain("forward", p, q)),
    "reverse": (lambda *x, **o: kl_div(*x, direction="reverse", **o), lambda p, q: plain("reverse", p, q)),
    "jsd": (jsd, lambda p, q: plain("jsd", p, q)),
    "jsd 0.1": (lambda *x, **o: jsd(*x, beta=0.1, **o), lambda p, q: plain("jsd", p, q, 0.1)),
    "tvd": (tvd, lambda p, q: plain("tvd", p, q)),
}


def problem(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of student and teacher, and targets of which every fourth is ignored."""
    logits = 2 * torch.randn(rows, vocabulary)
    teacher = logits + torch.randn(rows, vocabulary)
    target = torch.randint(vocabulary, (rows,))
    target[1::4] = -100
    return logits.to(device, dtype), teacher.to(device, dtype), target.to(device)


def reduced(losses: Tensor, target: Tensor, reduction: str = "mean", num_items: Any = None) -> Tensor:
    counted = target != -100
    losses = losses.where(counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" else counted.sum() if num_items is None else num_items)


def log_probs(x: Tensor, temperature: float = 1.0) -> Tensor:
    return (x.to(torch.promote_types(x.dtype, torch.float32)) / temperature).log_softmax(-1)


def draws(inputs: list[Tensor], path: str) -> list[list[Tensor]]:
    """The inputs, and on a GPU seven others near them: of a few values PyTorch's may be exact by luck."""
    others = 7 if path == "gpu" and inputs[0].numel() < 10_000 else 0
    return [inputs, *([x + torch.randn_like(x) / 8 for x in inputs] for _ in range(others))]


def differentiate(function: Function, dtype: torch.dtype | None, inputs: list[Tensor]) -> list[Tensor]:
    """The loss and the gradients of its sum, in the inputs' dtype or another one."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def compare(
    ours: Function, torchs: Function, inputs: list[Tensor], path: str
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]:
    """Losses, and each gradient, of ours, of PyTorch's and in fp64, of all draws together."""
    given = draws(inputs, path)
    ways = [(ours, None), (torchs, None), (torchs, torch.float64)]
    found = [[differentiate(*way, each) for each in given] for way in ways]
    losses, *gradients = zip(*([torch.stack(each) for each in zip(*way, strict=True)] for way in found), strict=True)
    return losses, gradients


@pytest.fixture
def compare_trained(within_bar: Callable[..., None], path: str) -> Callable[..., None]:
    """Losses and gradients at the bar, for an incoming gradient of one, as a training step has it."""

    def run(ours: Function, torchs: Function, inputs: list[Tensor]) -> None:
        losses, gradients = compare(ours, torchs, inputs, path)
        hold_loss(*losses)
        for each in gradients:
            within_bar(*each)

    return run


def hold_loss(ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """At the bar, or as exact as a log-probability about ten in fp32, where PyTorch may have luck with a difference."""
    mine, theirs = ((x.double() - exact).abs().max() for x in (ours, torchs))
    allowed = 2 * theirs + 5e-7 * exact.abs().max().clamp(min=1)
    assert ours.dtype == torchs.dtype and mine <= allowed, f"{mine:.2e} from fp64, PyTorch {theirs:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *FULL], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "reduction": "none"}, {"num_items": 5}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_fp64(kind, options, shape, dtype, path, device, compare_trained, poisoned) -> None:
    if shape in FULL and path != "gpu":
        pytest.skip("a size for a GPU")
    logits, teacher, target = problem(*shape, device, dtype)
    ours, losses = KINDS[kind]
    options = dict(options)
    temperature = options.get("temperature", 1.0)
    if kind == "tvd" and shape in FULL:
        # Its gradient jumps where both probabilities are equal: a last place decides, in one of millions of pairs.
        apart = log_probs(logits.double(), temperature) - log_probs(teacher.double(), temperature)
        teacher = torch.where(apart.abs() < 1e-5, teacher + 0.125, teacher)

    def torchs(x: Tensor) -> Tensor:
        log_q = log_probs(teacher.to(x.dtype), temperature)
        rest = {name: value for name, value in options.items() if name != "temperature"}
        return reduced(losses(log_probs(x, temperature), log_q), target, **rest)

    compare_trained(lambda x: ours(x, teacher, target, **options), torchs, [logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 9001], ids=["one part", "several parts"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept in registers", "read again"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_through_a_row(
    kind, kept, vocabulary, dtype, device, path, compare_trained, monkeypatch, poisoned
) -> None:
    """16 bits take other roundings on their way, in Triton's interpreter too."""
    if path != "gpu" and kept == (vocabulary > 4096):
        pytest.skip("programs that run one after the other cannot wait for each other, and keep what is all in one")
    monkeypatch.setattr(divergence_rows, "_MOST_KEPT", 32 if kept else 0)
    logits, teacher, target = problem(6, vocabulary, device, dtype)
    ours, losses = KINDS[kind]
    compare_trained(
        lambda x: ours(x, teacher, target),
        lambda x: reduced(losses(log_probs(x), log_probs(teacher.to(x.dtype))), target),
        [logits],
    )


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, *((9000, 25000, 60000, 131072) if torch.cuda.is_available() else ())])
@pytest.mark.parametrize(
    ("kind", "beta", "temperature"),
    [("jsd", 0.5, 1.0), ("jsd", 0.1, 0.7), ("forward_kl", 0.0, 0.7), ("reverse_kl", 1.0, 1.0)],
)
def test_16_bits_at_their_limits(kind, beta, temperature, vocabulary, dtype, device, monkeypatch, poisoned) -> None:
    """Equal rows, tokens that one side or both rule out, whole parts of them, far logits, ignored rows; in place."""
    # On a GPU, each program or cluster takes several rows.
    n_rows = (400 if vocabulary < 131072 else 70) if device.type == "cuda" else 8
    logits, teacher = (torch.randn(n_rows, vocabulary, device=device).mul(3).to(dtype) for _ in range(2))
    target = torch.zeros(n_rows, dtype=torch.int64, device=device)
    target[::5] = -100
    logits[1] = teacher[1]
    most = vocabulary * 9 // 10
    logits[2, 7:most] = teacher[2, 7:most] = teacher[3, 7:most] = -torch.inf
    if kind != "reverse_kl":
        teacher[4, 9:most] = -torch.inf
    if kind == "jsd":
        logits[4, 7:most] = -torch.inf
    if kind == "reverse_kl":
        teacher[3] = teacher[7]
    logits[6] *= 30
    # On a CPU two groups, which walk down four rows each.
    monkeypatch.setattr(divergence_rows, "_REGISTERS", 32 * 4 * 128)
    taken, takes = [], divergence_rows._is_narrow
    monkeypatch.setattr(divergence_rows, "_is_narrow", lambda *a: taken.append(takes(*a)) or taken[-1])
    form = divergence_rows.Form(kind, beta, temperature)
    scale, losses = torch.full((n_rows,), 3.0, device=device), [torch.empty(n_rows, device=device) for _ in range(2)]
    exact = reference_divergence(logits.double(), teacher.double(), target, form)
    gradient = reference_gradient(logits.double(), teacher.double(), target, scale.double(), form)
    torchs = (reference_gradient(logits, teacher, target, scale, form).double() - gradient).abs().nan_to_num()
    log_p, log_q = ((z.double() / temperature).log_softmax(1) for z in (logits, teacher))
    apart = (log_p - log_q).nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True)
    divergence_rows.divergence_rows(logits, teacher, target, None, losses[0], form)
    # Without a gradient, another kernel computes long rows.
    same = divergence_rows._cluster(logits, teacher, form, logits) is None
    divergence_rows.divergence_rows(logits, teacher, target, scale, losses[1], form, dz=logits)
    assert not same or torch.equal(*losses)
    assert (INTERPRETED or device.type == "cuda") == bool(taken and all(taken))
    # How exactly PyTorch adds so many numbers in fp32 depends on its version and the CPU.
    bounds = {"rtol": 2e-6, "atol": 5e-7} if taken else {"rtol": 3e-5, "atol": 1e-5}
    for loss in losses:
        torch.testing.assert_close(loss.double(), exact, **bounds)
    # Beside two last halves of a place, what fp32 is off where logits are far apart: PyTorch, and on a GPU logarithms.
    bar = gradient.abs().amax(1, keepdim=True) * torch.finfo(dtype).eps + 2 * torchs.amax(1, keepdim=True)
    bar += 1e-6 + (3 * 2**-22 * apart if device.type == "cuda" else 0.0)
    assert ((logits.double() - gradient).abs() <= bar).all()


@pytest.mark.parametrize(("multiprocessors", "kinds"), [(132, (True, True)), (14, (False, True)), (6, (False, False))])
def test_programs_wait_for_each_other_only_if_all_run_at_once(multiprocessors, kinds, monkeypatch) -> None:
    """A share of an A100 has 14 multiprocessors: 56 of the 64 programs of a row would wait for the rest for ever."""
    monkeypatch.setattr(divergence_rows, "multiprocessors", lambda device: multiprocessors)
    form, shape = divergence_rows.Form("jsd", 0.5, 1.0), (3, 262144)
    row: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, itemsize=2, shape=shape)
    row.stride, row.storage_offset = (lambda axis: shape[1]), (lambda: 0)
    assert divergence_rows._is_narrow(row, row, form, None) == kinds[0]
    (tile,) = (tile for tile in divergence_rows._TILES if tile.itemsize == 4)
    found = divergence_rows._most_parts(row, tile, divergence_rows._MOST_KEPT)
    assert (found == divergence_rows._MOST_KEPT) == kinds[1] and found <= 3 * multiprocessors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_match_fp64(kind, dtype, device, compare_trained, poisoned) -> None:
    """The gradient is that with respect to them, without that of log_softmax."""
    logits, teacher, target = problem(5, 300, device, torch.float32)
    given, told = log_probs(logits).to(dtype), log_probs(teacher).to(dtype)
    ours, losses = KINDS[kind]

    def torchs(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return reduced(losses(x.to(wide), told.to(wide)), target)

    compare_trained(lambda x: ours(x, told, target, normalized=True), torchs, [given])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [300, 9001])
def test_tvd_of_probabilities_matches_fp64(vocabulary, dtype, device, compare_trained, poisoned) -> None:
    """The gradient is that with respect to them, 0 where both are equal."""
    logits, teacher, target = problem(5, vocabulary, device, torch.float32)
    given, told = logits.softmax(-1).to(dtype), teacher.softmax(-1).to(dtype)
    told[:, 3:7] = given[:, 3:7]

    def torchs(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return reduced(0.5 * (x.to(wide) - told.to(wide)).abs().sum(-1), target)

    compare_trained(lambda x: tvd(x, told, target, probabilities=True), torchs, [given])
    with pytest.raises(ValueError, match="pass one of them"):
        tvd(given, told, normalized=True, probabilities=True)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_equals_trl(beta, device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
    logits, teacher, target = problem(9, 50, device, torch.float32)
    found = []
    for function in (
        lambda x: jsd(x, teacher, target, beta=beta, temperature=0.9),
        lambda x: GKDTrainer.generalized_jsd_loss(x, teacher, target, beta=beta, temperature=0.9),
    ):
        x = logits.clone().requires_grad_()
        loss = function(x)
        found.append((loss, torch.autograd.grad(loss, x)[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions(kind, device) -> None:
    logits = problem(5, 300, device, torch.float32)[0].requires_grad_()
    loss = KINDS[kind][0](logits, logits.detach())
    assert loss.abs() < 1e-6 and torch.autograd.grad(loss, logits)[0].abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_one_side_rules_out(kind, dtype, device) -> None:
    """Where p or q is 0, a term is 0 or infinite, and gradients are no NaN."""
    logits, teacher = (torch.randn(4, 40, device=device).to(dtype) for _ in range(2))
    logits[0, :3] = teacher[0, :3] = teacher[1, 3:9] = -torch.inf
    logits[2, 5], teacher[3, 7] = 200.0, 200.0
    ours, losses = KINDS[kind]
    found = ours(logits.requires_grad_(), teacher, reduction="none")
    p, q = log_probs(logits.detach().double()), log_probs(teacher.double())
    none = {"forward": q.exp() == 0, "reverse": p.exp() == 0}.get(kind, (p.exp() == 0) & (q.exp() == 0))
    expected = losses(p.masked_fill(none, 0.0), q.masked_fill(none, 0.0)) if kind in ("forward", "reverse") else None
    if expected is not None:
        torch.testing.assert_close(found.double(), expected.where(expected < 1e30, torch.inf), rtol=1e-5, atol=1e-5)
    finite = found.isfinite()
    assert finite.all() or kind == "reverse"
    (gradient,) = torch.autograd.grad(found[finite].sum(), logits)
    assert gradient[finite].isfinite().all()


def test_compiled_equals_eager(device, gradients) -> None:
    logits, teacher, target = problem(5, 40, device, torch.float32)
    for reduction in ("mean", "none"):
        function = lambda x, r=reduction: jsd(x.sin(), teacher, target, temperature=0.8, reduction=r).cos()  # noqa: E731
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for a, b in zip(gradients(function, [logits]), gradients(compiled, [logits]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(INTERPRETED, reason="what is tested is around the kernel")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    logits, teacher, target = problem(6, 20, device, torch.float32)
    form = ("jsd", 0.5, 2.0, False, -100)
    leaf = logits.requires_grad_()
    torch.library.opcheck(
        torch.ops.strata.divergence.default, (torch.tensor(3.0, device=device), leaf, teacher, target, *form, True)
    )
    torch.library.opcheck(torch.ops.strata.divergence_rows.default, (leaf, teacher, target, *form))
    given = (torch.rand(6, device=device), logits.detach(), teacher, target, *form)
    torch.library.opcheck(torch.ops.strata.divergence_rows_bwd.default, given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_long_rows_in_a_cuda_graph() -> None:
    """Replayed with other logits and targets, also in a strided view, the gradient is that of a call."""
    logits, teacher, target = problem(40, 128256, torch.device("cuda"), torch.bfloat16)
    logits, target = logits.repeat(1, 2)[:, :128256], target.clone()

    def step() -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = jsd(leaf, teacher, target, beta=0.3, temperature=1.5)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.mul_(-0.5)
    target.copy_(torch.where(target == -100, 0, -100))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_fp64_is_differentiated_exactly(device) -> None:
    logits, teacher, target = problem(5, 8, device, torch.float64)
    for ours, _ in KINDS.values():
        assert torch.autograd.gradcheck(
            lambda x, f=ours: f(x, teacher, target, temperature=1.5), logits.requires_grad_()
        )


def test_transforms_of_functions_see_plain_pytorch(device) -> None:
    logits, teacher, target = problem(5, 8, device, torch.float32)
    ours = torch.func.grad(lambda x: jsd(x, teacher, target))(logits)
    expected = torch.autograd.grad(jsd(logits.requires_grad_(), teacher, target), logits)[0]
    torch.testing.assert_close(ours, expected)


def test_no_rows_and_no_row_that_counts(device) -> None:
    empty = torch.randn(0, 8, device=device, requires_grad=True)
    jsd(empty, torch.randn(0, 8, device=device), reduction="sum").backward()
    assert empty.grad.shape == (0, 8)
    logits, teacher, target = problem(3, 8, device, torch.float32)
    loss = jsd(logits.requires_grad_(), teacher, torch.full_like(target, -100))
    assert loss.isnan() and not torch.autograd.grad(loss, logits)[0].any()


def test_double_backward_is_refused(device) -> None:
    logits, teacher, target = problem(3, 8, device, torch.float32)
    with pytest.raises(NotImplementedError, match="only once"):
        torch.autograd.grad(jsd(logits.requires_grad_(), teacher, target), logits, create_graph=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.1}, "beta 1.1 must be between"),
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"normalized": True, "temperature": 2.0}, "divide before the softmax"),
        ({"reduction": "batchmean"}, "one of mean, sum, none"),
        ({"reduction": "sum", "num_items": 3}, "has no divisor"),
    ],
    ids=str,
)
def test_wrong_options(options, message, device) -> None:
    logits, teacher, target = problem(3, 8, device, torch.float32)
    with pytest.raises(ValueError, match=message):
        jsd(logits, teacher, target, **options)


def test_wrong_tensors(device) -> None:
    logits, teacher, target = problem(3, 8, device, torch.float32)
    for arguments, message in (
        ((logits, teacher[:, :7]), "must have the shape of logits"),
        ((logits, teacher.requires_grad_()), "detach it"),
        ((logits, teacher.detach(), target[:2]), "must be int64"),
        ((logits.long(), teacher.detach()), "logits must be"),
    ):
        with pytest.raises(ValueError, match=message):
            jsd(*arguments)
    with pytest.raises(ValueError, match="direction 'backward'"):
        kl_div(logits, teacher.detach(), direction="backward")
