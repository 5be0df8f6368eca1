"""Every operator, by a small example each: who looks sees it, and what it gives is the same by every way to it.

A new operator needs a line in EXAMPLES, or in OPERATORS of `helpers/operators.py` and tests like these in its own file;
`test_every_operator_has_an_example` says so.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata_kernels import (
    LowRank,
    add_rms_norm,
    cross_entropy,
    experts,
    geglu,
    geglu_packed,
    gelu,
    layer_norm,
    linear_cross_entropy,
    qk_norm_rope,
    relu_squared,
    rms_norm,
    rope,
    silu,
    swiglu,
    swiglu_packed,
)
from strata_kernels.ops.float8.linear import float8_linear, float8_stored_linear, quantize_weight
from strata_kernels.ops.lora.seeded_dropout import seeded_dropout
from tests.kernels.helpers.operators import OPERATORS

ROWS = 6


@dataclass(frozen=True)
class Example:
    """A function of trained tensors and their shapes; those led by ROWS are rows of data, the others are parameters."""

    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, device: torch.device, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(rows if shape[0] == ROWS else shape[0], *shape[1:]) for shape in self.shapes]
        return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]

    @property
    def batched(self) -> tuple[int | None, ...]:
        """The axis of each input that `vmap` goes over, where there is one more in front."""
        return tuple(0 if shape[0] == ROWS else None for shape in self.shapes)


def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rope(q, k, *angles(q))


def normalized_and_rotated(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
    return qk_norm_rope(q, k, q_weight, k_weight, *angles(q))


def angles(q: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(32.0, device=q.device).view(4, 8) % 4
    return angle.cos(), angle.sin()


def loss(logits: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(logits, targets(logits), reduction=reduction)


def linear_loss(x: Tensor, weight: Tensor, reduction: str = "mean") -> Tensor:
    return linear_cross_entropy(x, weight, targets(x), reduction=reduction)


def mixed(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *biases: Tensor) -> Tensor:
    index = torch.arange(2 * x.shape[-2], device=x.device).view(-1, 2) % 3
    return experts(x, 0.3 * gate_up, 0.3 * down, index, router, gate_up_bias=biases[0], down_bias=biases[1])


def adapted(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *factors: Tensor) -> Tensor:
    index = torch.arange(2 * x.shape[-2], device=x.device).view(-1, 2) % 3
    of_up, of_down = (LowRank(*pair, 0.5) for pair in (factors[:2], factors[2:]))
    return experts(x, 0.3 * gate_up, 0.3 * down, index, router, gate_up_adapter=of_up, down_adapter=of_down)


def targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) % 5


def with_weight(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return function(*tensors[:-1], weight=tensors[-1])


X, XX, W = (ROWS, 8), (ROWS, 16), (8,)
Q, K = (ROWS, 2, 4, 8), (ROWS, 1, 4, 8)
PROJECTED = [
    (name, functools.partial(with_weight, function), shapes)
    for name, function, shapes in (
        ("swiglu", swiglu, (X, X)),
        ("swiglu_packed", swiglu_packed, (XX,)),
        ("geglu", geglu, (X, X)),
        ("geglu_tanh", functools.partial(geglu, approximate="tanh"), (X, X)),
        ("geglu_packed", geglu_packed, (XX,)),
        ("geglu_tanh_packed", functools.partial(geglu_packed, approximate="tanh"), (XX,)),
        ("relu_squared", relu_squared, (X,)),
        ("gelu", gelu, (X,)),
        ("gelu_tanh", functools.partial(gelu, approximate="tanh"), (X,)),
        ("quick_gelu", functools.partial(gelu, approximate="sigmoid"), (X,)),
        ("silu", silu, (X,)),
    )
]
EXAMPLES = {
    "rms_norm": Example(rms_norm, (X, W)),
    "add_rms_norm": Example(add_rms_norm, (X, X, W)),
    "layer_norm": Example(layer_norm, (X, W, W)),
    "rope": Example(rotated, (Q, K)),
    "qk_norm_rope": Example(normalized_and_rotated, (Q, K, W, W)),
    "swiglu": Example(swiglu, (X, X)),
    "swiglu_packed": Example(swiglu_packed, (X,)),
    "geglu": Example(geglu, (X, X)),
    "geglu_tanh": Example(functools.partial(geglu, approximate="tanh"), (X, X)),
    "geglu_packed": Example(geglu_packed, (X,)),
    "geglu_tanh_packed": Example(functools.partial(geglu_packed, approximate="tanh"), (X,)),
    "relu_squared": Example(relu_squared, (X,)),
    "gelu": Example(gelu, (X,)),
    "gelu_tanh": Example(functools.partial(gelu, approximate="tanh"), (X,)),
    "quick_gelu": Example(functools.partial(gelu, approximate="sigmoid"), (X,)),
    "silu": Example(silu, (X,)),
    **{f"{name}, projected": Example(function, (*shapes, (5, 8))) for name, function, shapes in PROJECTED},
    "experts": Example(mixed, (X, (3, 8, 8), (3, 8, 4), (ROWS, 2), (3, 8), (3, 8))),
    "experts, adapted": Example(
        adapted, (X, (3, 8, 8), (3, 8, 4), (ROWS, 2), (3, 2, 8), (3, 8, 2), (3, 2, 4), (3, 8, 2))
    ),
    "cross_entropy": Example(loss, (X,)),
    "cross_entropy_rows": Example(functools.partial(loss, reduction="none"), (X,)),
    "linear_cross_entropy": Example(linear_loss, (X, (5, 8))),
    "linear_cross_entropy_rows": Example(functools.partial(linear_loss, reduction="none"), (X, (5, 8))),
}


@pytest.fixture(params=EXAMPLES.values(), ids=EXAMPLES.keys())
def example(request: pytest.FixtureRequest) -> Example:
    return request.param


class Watch(TorchDispatchMode):
    """Notes the names of this project's operators as they pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "strata":
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def summed(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """A scalar that no two results enter alike."""

    def run(*inputs: Tensor) -> Tensor:
        return sum((i + y.square()).sum() * (i + 1) for i, y in enumerate(as_tuple(function(*inputs))))

    return run


def test_every_operator_has_an_example() -> None:
    """Here, or in the table of small calls: files of losses over a head test their operators themselves."""
    with Watch() as watch:
        for example in EXAMPLES.values():
            summed(example.function)(*example.inputs(torch.device("cpu"))).backward()
        for operator in OPERATORS.values():
            tensors = list(operator.inputs().values())
            operator.differentiate(operator.ours, tensors, [torch.ones(shape) for shape in operator.results])
        multiply_in_float8()
        seeded_dropout(torch.ones(4), torch.ones(1, dtype=torch.int64), 0.5)
    registered = {name.split("::")[1].split(".")[0] for name in registered_names()}
    # Activations find largest magnitudes only where no mode looks on: `test_float8.py` tests these.
    assert {name for name in registered if not name.endswith("_and_largest")} == set(watch.seen)


def multiply_in_float8() -> None:
    """A layer of each scaling, and one with a frozen weight."""
    x, weight = (torch.ones(16, 16, requires_grad=True) for _ in range(2))
    for scaling in ("tensorwise", "rowwise"):
        float8_linear(x, weight, scaling=scaling).sum().backward()
    float8_stored_linear(x, *quantize_weight(weight.detach())).sum().backward()


def registered_names() -> Iterator[str]:
    return (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("strata::"))


def test_a_mode_sees_what_is_otherwise_called_directly(example, device, gradients) -> None:
    for seed in range(4):  # on a GPU, a call that runs, one that is traced, and two that are replayed
        inputs = example.inputs(device, seed)
        directly = gradients(example.function, inputs)
        with Watch() as watch:
            assert equal(gradients(example.function, inputs), directly)
        assert watch.seen


def test_inference(example, device) -> None:
    inputs = example.inputs(device)
    expected = as_tuple(example.function(*inputs))
    with torch.inference_mode():
        results = as_tuple(example.function(*inputs))
    assert equal(list(results), list(expected)) and all(y.is_inference() for y in results)
    assert all(y.requires_grad for y in expected)
    with torch.no_grad():
        assert not any(y.requires_grad for y in as_tuple(example.function(*inputs)))


def test_nothing_is_recorded_below_autograd(example, device) -> None:
    """Where the implementation of another operator calls this one."""
    with torch._C._AutoDispatchBelowAutograd():
        assert not any(y.requires_grad for y in as_tuple(example.function(*example.inputs(device))))


def test_fake_tensors(example, device) -> None:
    expected = as_tuple(example.function(*example.inputs(device)))
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in example.inputs(device)]
        results = as_tuple(example.function(*inputs))
    for fake, real in zip(results, expected, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.fake_mode is mode and fake.requires_grad


def test_traced(example, device) -> None:
    inputs = example.inputs(device)
    graph = make_fx(lambda *tensors: example.function(*tensors))(*inputs)
    assert any(getattr(node.target, "namespace", None) == "strata" for node in graph.graph.nodes)
    assert equal(list(as_tuple(graph(*inputs))), list(as_tuple(example.function(*inputs))))


def test_exported(example, device) -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            return example.function(*inputs)

    program = torch.export.export(Model(), tuple(example.inputs(device)), strict=False)
    assert any(getattr(node.target, "namespace", None) == "strata" for node in program.graph.nodes)


def test_compiled_once_for_any_number_of_rows(example, device, gradients) -> None:
    # What is compiled of one function has a limit, and all examples are called by one.
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(example.function, fullgraph=True, backend=backend)
    for rows in (ROWS, ROWS + 3):
        inputs = [x.detach() for x in example.inputs(device, rows=rows)]
        expected = gradients(example.function, inputs)

        def run(*leaves: Tensor) -> Tensor | tuple[Tensor, ...]:
            for leaf, axis in zip(leaves, example.batched, strict=True):
                if axis is not None:
                    torch._dynamo.mark_dynamic(leaf, axis)
            return compiled(*leaves)

        assert equal(gradients(run, inputs), expected)
    assert backend.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # compiled autograd's own look
def test_compiled_backward_pass(device) -> None:
    """Compiled autograd, which traces the backward function of an eager node."""
    found = []
    for compiler in (torch.compile(backend="eager", fullgraph=True), None):
        inputs = EXAMPLES["rms_norm"].inputs(device)
        with compiled_autograd._enable(compiler) if compiler else contextlib.nullcontext():
            summed(rms_norm)(*inputs).backward()
        found.append([x.grad for x in inputs])
    assert equal(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(example, device, reentrant) -> None:
    found = []
    for run in (example.function, functools.partial(checkpoint, example.function, use_reentrant=reentrant)):
        inputs = example.inputs(device)
        summed(run)(*inputs).backward()
        found.append([x.grad for x in inputs])
    assert equal(*found)


def test_selective_checkpointing_keeps_what_a_policy_names(example, device, gradients) -> None:
    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        ours = operator.namespace == "strata"
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    run = functools.partial(checkpoint, example.function, use_reentrant=False, context_fn=contexts)
    inputs = example.inputs(device)
    with Watch() as plain:
        expected = gradients(example.function, inputs)
    with Watch() as selective:
        assert equal(gradients(run, inputs), expected)
    assert selective.seen == plain.seen, "an operator was run again"


def test_func_grad(example, device) -> None:
    inputs = example.inputs(device)
    function = summed(example.function)
    expected = torch.autograd.grad(function(*inputs), inputs)
    given = torch.func.grad(function, argnums=tuple(range(len(inputs))))(*(x.detach() for x in inputs))
    for ours, theirs in zip(given, expected, strict=True):
        # On a GPU the plain function and the kernel add up in different orders; both are held to fp64 elsewhere.
        bars = {"rtol": 1e-5, "atol": 1e-5} if device.type == "cuda" else {}
        torch.testing.assert_close(ours, theirs, **bars)


def test_func_jvp(example, device) -> None:
    inputs, directions = example.inputs(device), [x.detach() for x in example.inputs(device, seed=1)]
    function = summed(example.function)
    slopes = torch.autograd.grad(function(*inputs), inputs)
    _, given = torch.func.jvp(function, tuple(x.detach() for x in inputs), tuple(directions))
    expected = sum((a * b).sum() for a, b in zip(slopes, directions, strict=True))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # a loop over the batch, where no rule is
def test_vmap(example, device) -> None:
    first, second = (example.inputs(device, seed) for seed in (0, 1))
    # Parameters are shared by the batch.
    second = [a if axis is None else b for a, b, axis in zip(first, second, example.batched, strict=True)]
    stacked = [
        a if axis is None else torch.stack((a, b)) for a, b, axis in zip(first, second, example.batched, strict=True)
    ]
    leaves = [x.detach().requires_grad_() for x in stacked]
    given = as_tuple(torch.func.vmap(example.function, in_dims=example.batched)(*leaves))
    expected = [as_tuple(example.function(*inputs)) for inputs in (first, second)]
    for i, results in enumerate(expected):
        for ours, theirs in zip(given, results, strict=True):
            torch.testing.assert_close(ours[i], theirs)
    # What the batch is made of may be trained.
    ours = torch.autograd.grad(sum(y.sum() for y in given), leaves)
    total = sum(y.sum() for results in expected for y in results)
    for mine, a, b, axis in zip(ours, first, second, example.batched, strict=True):
        if axis is not None:
            torch.testing.assert_close(mine, torch.stack(torch.autograd.grad(total, (a, b), retain_graph=True)))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_batch_of_incoming_gradients(example, device) -> None:
    inputs = example.inputs(device)
    results = as_tuple(example.function(*inputs))
    incoming = [torch.randn(2, *y.shape).to(y) for y in results]
    given = torch.autograd.grad(results, inputs, incoming, retain_graph=True, is_grads_batched=True)
    again = torch.autograd.grad(results, inputs, incoming, is_grads_batched=True)
    for i in range(2):
        expected = torch.autograd.grad(as_tuple(example.function(*inputs)), inputs, [dy[i] for dy in incoming])
        for ours, last, theirs in zip(given, again, expected, strict=True):
            torch.testing.assert_close(ours[i], theirs)
            assert torch.equal(last, ours)


def test_threads(path, device, gradients) -> None:
    """Keys, replays and modes of one thread are none of another's."""
    if path == "interpreter":
        pytest.skip("the interpreter runs in one thread")
    inputs = [EXAMPLES["rms_norm"].inputs(device, seed) for seed in range(4)]
    expected = [gradients(rms_norm, x) for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(5):
            if not equal(gradients(rms_norm, inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    with Watch() as watch:
        rms_norm(*inputs[0])
    for thread in threads:
        thread.join()
    assert not wrong and watch.seen == ["rms_norm"]


def test_what_only_the_dispatcher_knows(device) -> None:
    x, weight = (t.detach() for t in EXAMPLES["rms_norm"].inputs(device))
    # A number of another type than the schema's.
    assert torch.equal(rms_norm(x, weight, 1), rms_norm(x, weight, 1.0))
    # A view that still has to be negated.
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg() and torch.equal(rms_norm(negated, weight), rms_norm(-x, weight))
    # A wrapper that outlived its transform.
    leaked = []
    torch.func.grad(lambda t: (leaked.append(t), t.sum())[1])(x)
    assert torch.equal(rms_norm(leaked[0], weight), rms_norm(x, weight))


def test_empty(example, device, gradients) -> None:
    results = gradients(example.function, example.inputs(device, rows=0))
    # The mean over no rows is NaN.
    assert all(not y.nan_to_num().any() for y in results)
