"""Activations with a projection behind them: the bits of one after the other, and nothing kept between them."""

import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vmap
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from strata_kernels import geglu, geglu_packed, gelu, relu_squared, silu, swiglu, swiglu_packed
from strata_kernels.nn import GatedMLP
from strata_kernels.ops.activation import activation_linear
from strata_kernels.patch.structure import is_plain_linear

WIDTH, FEATURES = 48, 24
# Of a thread whose first work on a GPU is a product, in a process that has none of another kind.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA:UserWarning")
# The operator, how many tensors it takes, and how many times the width each has.
OPERATORS = {
    "swiglu": (swiglu, 2, 1),
    "swiglu, multiplied": (partial(swiglu, gate_multiplier=0.75, multiplier=0.3), 2, 1),
    "swiglu_packed": (swiglu_packed, 1, 2),
    "swiglu_packed, gate behind": (partial(swiglu_packed, gate_first=False), 1, 2),
    "geglu": (geglu, 2, 1),
    "geglu, tanh": (partial(geglu, approximate="tanh"), 2, 1),
    "geglu_packed": (geglu_packed, 1, 2),
    "relu_squared": (relu_squared, 1, 1),
    "gelu": (gelu, 1, 1),
    "gelu, tanh": (partial(gelu, approximate="tanh"), 1, 1),
    "gelu, sigmoid": (partial(gelu, approximate="sigmoid"), 1, 1),
    "silu": (silu, 1, 1),
}


def leaves(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Tensor]:
    """What the activation takes, a weight and a bias."""
    _, count, times = OPERATORS[name]
    shapes = [(2, 5, times * WIDTH)] * count + [(FEATURES, WIDTH), (FEATURES,)]
    *inputs, weight, bias = (torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes)
    return inputs, weight, bias


def two_steps(operator: Callable[..., Tensor], *inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(operator(*inputs), weight, bias)


def kept(function: Callable[[], Tensor]) -> int:
    """How many numbers autograd keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_are_those_of_two_steps(name, biased, dtype, device) -> None:
    operator = OPERATORS[name][0]
    inputs, weight, bias = leaves(name, device, dtype)
    projection = {"weight": weight, "bias": bias if biased else None}
    learning = [*inputs, weight, *[bias] * biased]
    d_out = torch.randn(2, 5, FEATURES).to(device, dtype)
    ours, expected = operator(*inputs, **projection), two_steps(operator, *inputs, **projection)
    assert torch.equal(ours, expected)
    for mine, theirs in zip(*(torch.autograd.grad(y, learning, d_out) for y in (ours, expected)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("features", [FEATURES, 2 * WIDTH], ids=["narrower", "wider"])
def test_matrices_too_large_for_a_product_are_multiplied_in_parts(features, biased, monkeypatch) -> None:
    gate, up = (torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((features, WIDTH), features))
    projection = {"weight": weight, "bias": bias if biased else None}
    learning, d_out = [gate, up, weight, *[bias] * biased], torch.randn(2, 5, features, dtype=torch.float64)
    expected = two_steps(swiglu, gate, up, **projection)
    expected = (expected, *torch.autograd.grad(expected, learning, d_out))
    # The last part of 10 rows is a single one.
    monkeypatch.setattr(activation_linear, "_LARGEST", 3 * max(WIDTH, features))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        y = swiglu(gate, up, **projection)
        found = (y, *torch.autograd.grad(y, learning, d_out))
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm")]
    assert len(products) == 3 * 4
    assert not any(10 in shape for event in products for shape in event.input_shapes)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", OPERATORS)
def test_keeps_nothing_between(name, device) -> None:
    operator = OPERATORS[name][0]
    inputs, weight, bias = leaves(name, device)
    least = sum(x.numel() for x in inputs) + weight.numel()
    assert kept(lambda: operator(*inputs, weight=weight, bias=bias)) == least
    assert kept(lambda: two_steps(operator, *inputs, weight=weight, bias=bias)) == least + 2 * 5 * WIDTH


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_recomputation_ends_before_the_product(biased, device, monkeypatch) -> None:
    products = []
    fill = activation_linear._fill
    monkeypatch.setattr(activation_linear, "_fill", lambda *arguments: (products.append(1), fill(*arguments)))
    inputs, weight, bias = leaves("swiglu", device)
    learning = [*inputs, weight, *[bias] * biased]
    function = partial(swiglu, *inputs, weight=weight, bias=bias if biased else None)
    expected = torch.autograd.grad(function().sum(), learning)
    assert len(products) == 1
    result = checkpoint(function, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(result.sum(), learning), expected))
    assert len(products) == 2


def test_a_weight_that_does_not_learn(device) -> None:
    inputs, weight, _ = leaves("swiglu", device)
    weight.requires_grad_(False)
    gradients = []
    for function in (swiglu, partial(two_steps, swiglu)):
        gradients.append(torch.autograd.grad(function(*inputs, weight=weight).sum(), inputs))
    assert all(map(torch.equal, *gradients))


def test_only_the_weight_learns(device) -> None:
    inputs, weight, _ = leaves("swiglu", device)
    inputs = [x.detach() for x in inputs]
    ours, theirs = (
        torch.autograd.grad(y.sum(), weight)[0]
        for y in (swiglu(*inputs, weight=weight), two_steps(swiglu, *inputs, weight=weight))
    )
    assert torch.equal(ours, theirs)


def test_under_autocast(device) -> None:
    inputs, weight, _ = leaves("swiglu", device)
    with torch.autocast(device.type, torch.bfloat16):
        ours, theirs = swiglu(*inputs, weight=weight), two_steps(swiglu, *inputs, weight=weight)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    ours.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_second_derivative() -> None:
    inputs, weight, bias = leaves("swiglu", torch.device("cpu"), torch.float64)
    short = [x.detach()[:1, :2, :4].clone().requires_grad_() for x in inputs]
    weight, bias = (x.detach()[:3, ..., :4].clone().requires_grad_() for x in (weight, bias[:, None]))

    def projected(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return swiglu(gate, up, weight=weight, bias=bias[:, 0])

    assert torch.autograd.gradcheck(projected, (*short, weight, bias))
    assert torch.autograd.gradgradcheck(projected, (*short, weight, bias))


@pytest.mark.parametrize("projected", [False, True], ids=["alone", "projected"])
@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivative_by_transforms(name, projected) -> None:
    operator = OPERATORS[name][0]
    inputs, weight, _ = leaves(name, torch.device("cpu"), torch.float64)
    first, *others = (x.detach()[0, :2].clone() for x in inputs)
    weight = weight.detach() if projected else None

    def loss(x: Tensor) -> Tensor:
        return operator(x, *others, weight=weight).square().sum()

    torch.testing.assert_close(jacrev(grad(loss))(first), torch.autograd.functional.hessian(loss, first))


def test_many_gradients_at_once() -> None:
    inputs, weight, bias = leaves("swiglu", torch.device("cpu"))
    learning, d_outs = (*inputs, weight, bias), torch.randn(3, 2, 5, FEATURES)
    y = swiglu(*inputs, weight=weight, bias=bias)
    together = torch.autograd.grad(y, learning, d_outs, is_grads_batched=True, retain_graph=True)
    apart = zip(*(torch.autograd.grad(y, learning, d_out, retain_graph=True) for d_out in d_outs), strict=True)
    torch.testing.assert_close(together, tuple(map(torch.stack, apart)))


@pytest.mark.parametrize("strict", [False, True], ids=["by tracing", "by bytecode"])
def test_an_exported_model_learns(strict) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), GatedMLP(8, 16, bias=True)), torch.randn(2, 3, 8)
    exported = torch.export.export(model, (x,), strict=strict).module()
    exported(x).sum().backward()
    model(x).sum().backward()
    expected = dict(model.named_parameters())
    for path, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[path].grad)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")  # of shapes; of tracing
def test_a_traced_model_can_be_saved() -> None:
    traced = torch.jit.trace(GatedMLP(8, 16), (torch.randn(2, 3, 8),), check_trace=False)
    torch.jit.save(traced, io.BytesIO())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own look
@pytest.mark.parametrize(
    "transform",
    [lambda f: vmap(f), lambda f: vmap(grad(lambda x: f(x).sum())), lambda f: lambda x: jvp(f, (x,), (x,))[1]],
    ids=["vmap", "gradients of samples", "jvp"],
)
def test_transforms_compile(transform) -> None:
    torch._dynamo.reset()
    run, x = transform(GatedMLP(8, 16)), torch.randn(4, 3, 8)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(x), run(x))


def test_a_compiled_layer_keeps_nothing_between() -> None:
    torch._dynamo.reset()
    inputs, weight, bias = leaves("swiglu", torch.device("cpu"))
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    least = sum(x.numel() for x in inputs) + weight.numel()
    assert kept(lambda: compiled(*inputs, weight=weight, bias=bias)) == least


def test_a_subclass_of_tensors_stays_one() -> None:
    mlp, x = GatedMLP(8, 16), torch.randn(2, 8)
    y = mlp(x.as_subclass(Wrapped))
    assert type(y) is Wrapped and torch.equal(y.as_subclass(Tensor), mlp(x))
    y.sum().backward()


def test_inputs_that_do_not_learn_are_not_kept() -> None:
    inputs, weight, _ = leaves("swiglu", torch.device("cpu"))
    gate, up = (x.detach() for x in inputs)
    assert kept(lambda: swiglu(gate, up, weight=weight)) == 2 * 5 * WIDTH
    y = swiglu(gate, up, weight=weight)
    gate.zero_()
    y.sum().backward()


@pytest.mark.parametrize(("width", "features"), [(0, 3), (4, 0)], ids=str)
def test_no_width(width, features) -> None:
    gate, up = (torch.randn(2, width, requires_grad=True) for _ in range(2))
    swiglu(gate, up, weight=torch.randn(features, width, requires_grad=True)).sum().backward()
    assert gate.grad.shape == (2, width) and not gate.grad.any()


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ((FEATURES, WIDTH + 1), None, rf"weight must have the shape \[H, {WIDTH}\], got"),
        ((WIDTH,), None, r"weight must have the shape \[H, "),
        ((FEATURES, WIDTH), (FEATURES + 1,), rf"bias must have the shape \[{FEATURES}\], got"),
        (None, (FEATURES,), "bias belongs to a projection: pass its weight too, or omit bias"),
    ],
    ids=["too wide", "no matrix", "another bias", "bias alone"],
)
def test_what_does_not_fit_raises(weight, bias, message) -> None:
    gate = torch.zeros(3, WIDTH)
    with pytest.raises(ValueError, match=message):
        swiglu(gate, gate, **{k: v and torch.zeros(v) for k, v in {"weight": weight, "bias": bias}.items()})


class Other(nn.Linear):
    pass


class Wrapped(Tensor):
    pass


def hooked(add: str) -> nn.Linear:
    linear = nn.Linear(2, 2)
    getattr(linear, add)(lambda *_: None)
    return linear


def with_own_forward() -> nn.Linear:
    linear = nn.Linear(2, 2)
    linear.forward = lambda x: x
    return linear


def with_other_weight() -> nn.Linear:
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))
    return linear


def test_plain_linear() -> None:
    assert is_plain_linear(nn.Linear(2, 2)) and is_plain_linear(nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Other(2, 2),
        lambda: nn.Identity(),
        with_own_forward,
        with_other_weight,
        *(
            partial(hooked, f"register_{kind}_hook")
            for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        ),
    ],
    ids=["derived", "another", "own forward", "own tensor", "after", "before", "after backward", "before backward"],
)
def test_not_plain_linear(make) -> None:
    assert not is_plain_linear(make())


def test_hooks_on_all_modules_see_the_projection() -> None:
    mlp, seen = GatedMLP(8, 16), []
    hook = register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        mlp(torch.randn(2, 8))
    finally:
        hook.remove()
    assert mlp.down_proj in seen


class Offering(nn.Linear):
    """A projection that takes the activation before it along, and notes that it did."""

    taken = 0

    def project_activation(self, activate: Callable[..., Tensor]) -> Tensor:
        self.taken += 1
        return activate(weight=self.weight, bias=self.bias)


def test_a_projection_may_offer_to_take_the_activation_along(device) -> None:
    torch.manual_seed(0)
    mlp, x = GatedMLP(8, 16, bias=True, device=device), torch.randn(3, 8, device=device)
    expected = mlp(x)
    mlp.down_proj.__class__ = Offering
    assert torch.equal(mlp(x), expected) and mlp.down_proj.taken == 1
    mlp.down_proj.register_forward_hook(lambda module, inputs, output: None)
    assert torch.equal(mlp(x), expected) and mlp.down_proj.taken == 1


@pytest.mark.parametrize("packed", [False, True], ids=["two", "packed"])
def test_a_hooked_projection_is_called(packed, device) -> None:
    torch.manual_seed(0)
    mlp, x = GatedMLP(8, 16, packed=packed, bias=True, device=device), torch.randn(3, 8, device=device)
    expected = mlp(x)
    seen: list[Tensor] = []
    mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert torch.equal(mlp(x), expected) and len(seen) == 1
