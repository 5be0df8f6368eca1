"""What rms_norm, add_rms_norm and layer_norm have in common: how rows are cut, and what operators owe their callers."""

import functools
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata_kernels import add_rms_norm, layer_norm, rms_norm
from strata_kernels.ops._launch import recording
from strata_kernels.warmup import record
from strata_kernels.warmup.cross_compile import target_of

norm = sys.modules["strata_kernels.ops.norm.norm_launch"]
Tile = norm.Tile

EPS = 1e-5


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return torch_rms_norm(h, h.shape[-1:], weight, EPS), h


# Ours, PyTorch's, and how many inputs are [..., D] and how many [D].
NORMS = {
    "rms_norm": (
        lambda x, w: rms_norm(x, w, EPS, cast="gemma"),
        lambda x, w: torch_rms_norm(x, w.shape, w, EPS),
        (1, 1),
    ),
    "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w, EPS, cast="gemma"), torch_add_rms_norm, (2, 1)),
    "layer_norm": (
        lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: torch_layer_norm(x, w.shape, w, b, EPS),
        (1, 2),
    ),
}
each = pytest.mark.parametrize("name", NORMS)
compiles = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")


def randoms(
    name: str, *shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32, grad: bool = False
) -> list[Tensor]:
    """Inputs of a norm of NORMS."""
    wide, narrow = NORMS[name][2]
    sizes = [shape] * wide + [shape[-1:]] * narrow
    return [torch.randn(size, device=device).to(dtype).requires_grad_(grad) for size in sizes]


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each walks over several tiles of a small input, on a GPU too."""
    monkeypatch.setattr(norm, "multiprocessors", lambda device: 1)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`tables(tile, own_sums=…)` cuts rows of any width in this way."""
    plans = norm._forward_plan, norm._backward_plan

    def use(tile: Tile, own_sums: int) -> None:
        for name, value in (("_FORWARD", (tile,)), ("_BACKWARD", (tile,)), ("_OWN_SUMS", own_sums)):
            monkeypatch.setattr(norm, name, value)
        for plan in plans:
            plan.cache_clear()

    yield use
    for plan in plans:
        plan.cache_clear()


# Every way in which the tables may cut a row, at widths that the interpreter bears.
TILINGS = {
    "several rows a tile": Tile(row=2**40, warps=4, tile=1024, occupancy=2),
    "blocks": Tile(row=2**40, warps=4, block=128),
    "added in groups": Tile(row=2**40, warps=4, occupancy=3, groups=2),
    "walked over again": Tile(row=2**40, warps=4, block=128, keep=False, occupancy=2),
    "walked over again, shared": Tile(row=2**40, warps=4, block=128, keep=False),
}


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("width", [16, 100])
@each
def test_rows_however_cut(name, width, tiling, device, compare, poisoned, tables) -> None:
    tables(TILINGS[tiling], own_sums=64 if "shared" in tiling else 2**40)
    ours, torchs, _ = NORMS[name]
    compare(ours, torchs, randoms(name, 3, width, device=device))


STRIDED = {
    "every other feature": lambda x: x[..., ::2],
    "columns of a wider projection": lambda x: x[..., 8:40],
    "transposed": lambda x: x.transpose(0, 1),
    "unaligned": lambda x: x[..., 1:],
    "broadcast": lambda x: x[:1].expand(2, -1, -1),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
@each
def test_strided_inputs_and_gradients(name, view, device, poisoned) -> None:
    ours, _, (wide, _) = NORMS[name]
    x, residual, dy, dh = (view(torch.randn(2, 3, 64, device=device)) for _ in range(4))
    narrow = [torch.randn(2 * x.shape[-1], device=device)[::2] for _ in range(NORMS[name][2][1])]
    given = [x, residual][:wide] + narrow

    def differentiate(inputs: list[Tensor], incoming: list[Tensor]) -> list[Tensor]:
        leaves = [leaf.detach().requires_grad_() for leaf in inputs]
        results = ours(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        assert all(y.is_contiguous() for y in results)
        return [*results, *torch.autograd.grad(results, leaves, incoming[: len(results)])]

    strided = differentiate(given, [dy, dh])
    dense = differentiate([leaf.contiguous() for leaf in given], [dy.contiguous(), dh.contiguous()])
    torch.testing.assert_close(strided, dense)


@each
def test_rows_far_apart(name, far, device, gradients) -> None:
    ours, _, (wide, narrow) = NORMS[name]
    weights = [torch.randn(48, device=device).bfloat16() for _ in range(narrow)]
    x = far(3, 48)
    given, dense = (gradients(ours, [y] * wide + weights) for y in (x, x.clone()))
    assert all(map(torch.equal, given, dense))


def test_gradients_far_apart(far, device) -> None:
    dy, weight = far(3, 48), torch.randn(48, device=device).bfloat16()
    y, h = add_rms_norm(leaf := dy.clone().requires_grad_(), dy.clone(), weight)
    given, dense = (torch.autograd.grad((y, h), leaf, (d, d), retain_graph=True)[0] for d in (dy, dy.clone()))
    assert torch.equal(given, dense)


@each
def test_no_rows(name, device, poisoned) -> None:
    inputs = randoms(name, 2, 0, 8, device=device, grad=True)
    results = NORMS[name][0](*inputs)
    results = results if isinstance(results, tuple) else (results,)
    sum(y.sum() for y in results).backward()
    assert all(y.shape == (2, 0, 8) for y in results)
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


@each
def test_repeats_bit_for_bit(name, device) -> None:
    """Also for one graph, whose counters of finished programs serve several backward passes."""
    inputs = randoms(name, 40, 48, device=device, grad=True)
    passes = []
    for _ in range(2):
        results = NORMS[name][0](*inputs)
        loss = sum(y.sin().sum() for y in (results if isinstance(results, tuple) else (results,)))
        passes += [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for later in passes[1:] for a, b in zip(passes[0], later, strict=True))


@each
def test_frozen_inputs_get_no_gradient_and_change_no_other(name, device, poisoned) -> None:
    inputs = randoms(name, 5, 16, device=device)
    trained = [x.clone().requires_grad_() for x in inputs]

    def loss(*inputs: Tensor) -> Tensor:
        results = NORMS[name][0](*inputs)
        return sum(y.sin().sum() for y in (results if isinstance(results, tuple) else (results,)))

    gradients = torch.autograd.grad(loss(*trained), trained)
    for i, gradient in enumerate(gradients):
        alone = [x.clone().requires_grad_(i == j) for j, x in enumerate(inputs)]
        assert torch.equal(torch.autograd.grad(loss(*alone), alone[i])[0], gradient)


def test_one_tensor_given_twice(device, compare) -> None:
    compare(
        lambda x, w: add_rms_norm(x, x, w, EPS, cast="gemma"),
        lambda x, w: torch_add_rms_norm(x, x, w),
        [torch.randn(5, 32, device=device), torch.randn(32, device=device)],
    )


@compiles
def test_compiled_equals_eager_at_any_number_of_rows(device, gradients) -> None:
    """One graph for all, compiled once for static sizes and once for dynamic ones."""
    torch._dynamo.reset()  # What another device taught it about the sizes of this code.
    graphs = []

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, h = add_rms_norm(x.transpose(0, 1) * 2, rms_norm(x, w).transpose(0, 1), w)
        return layer_norm(y, w, b).cos().transpose(0, 1) + h.transpose(0, 1)

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    weights = [torch.randn(24, device=device) for _ in range(2)]
    for rows in (4, 7, 9):
        inputs = [torch.randn(rows, 3, 24, device=device), *weights]
        eager, traced = (gradients(f, inputs) for f in (function, compiled))
        assert all(map(torch.equal, eager, traced))
    assert len(graphs) == 2


@each
def test_selective_checkpointing_sees_the_operator(name, device, gradients) -> None:
    operator, forwards = getattr(torch.ops.strata, name).default, []

    def policy(context, op, *args, **kwargs):
        forwards.extend([context.is_recompute] * (op == operator))
        return CheckpointPolicy.MUST_SAVE if op == operator else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, *others):
        return NORMS[name][0](x.sin(), *others)

    def checkpointed(*inputs):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)

    inputs = randoms(name, 6, 16, device=device)
    plain, saved = (gradients(f, inputs) for f in (function, checkpointed))
    assert all(map(torch.equal, plain, saved))
    assert False in forwards


@each
def test_autocast_changes_nothing(name, device, gradients) -> None:
    inputs = randoms(name, 5, 16, device=device, dtype=torch.bfloat16)
    plain = gradients(NORMS[name][0], inputs)
    with torch.autocast(device.type, torch.float16):
        cast = gradients(NORMS[name][0], inputs)
    assert all(map(torch.equal, plain, cast))


@each
def test_transforms_of_torch_func(name, device) -> None:
    inputs = [x.double() for x in randoms(name, 3, 8, device=device)]

    def losses(norm):
        def loss(*inputs: Tensor) -> Tensor:
            results = norm(*inputs)
            return sum(y.sin().sum() for y in (results if isinstance(results, tuple) else (results,)))

        per_row = torch.func.vmap(torch.func.grad(loss), in_dims=tuple(0 if x.dim() == 2 else None for x in inputs))
        tangents = torch.func.jvp(loss, tuple(inputs), tuple(inputs))[1]
        return [per_row(*inputs), tangents, torch.func.hessian(loss)(*inputs)]

    for ours, torchs in zip(losses(NORMS[name][0]), losses(NORMS[name][1]), strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
@each
def test_is_a_well_formed_operator(name, device) -> None:
    inputs = randoms(name, 4, 6, 20, device=device)
    inputs[0] = inputs[0].transpose(0, 1)
    if name == "add_rms_norm":
        inputs[1] = inputs[1].transpose(0, 1)
    attributes = (EPS,) if name == "layer_norm" else (EPS, 0.0, "llama")
    *results, stats = getattr(torch.ops.strata, name)(*inputs, *attributes)
    gradients = [torch.randn_like(y) for y in results]
    if name == "layer_norm":
        backward = (torch.ops.strata.layer_norm_bwd.default, (*gradients, *inputs, stats, True, True))
    else:
        dh = gradients[1] if name == "add_rms_norm" else None
        args = (gradients[0], dh, results[-1] if dh is not None else inputs[0], inputs[-1], stats, 0.0, True)
        backward = (torch.ops.strata.rms_norm_bwd.default, args)
    trained = tuple(x.clone().requires_grad_() for x in inputs)
    torch.library.opcheck(getattr(torch.ops.strata, name).default, (*trained, *attributes))
    torch.library.opcheck(*backward)


@each
def test_more_rows_than_32_bits_index_are_refused(name) -> None:
    with recording(), pytest.raises(ValueError, match="too many for a 32-bit index: split it"):
        NORMS[name][0](*randoms(name, 2**31 - 1, 1, device="meta"))


@compiles
@each
def test_a_width_compiles_each_kernel_once_whatever_the_rows(name) -> None:
    def step(rows: int, width: int) -> None:
        inputs = randoms(name, rows, width, device="meta", dtype=torch.bfloat16, grad=True)
        results = NORMS[name][0](*inputs)
        sum(y.sum() for y in (results if isinstance(results, tuple) else (results,))).backward()

    for width in (128, 2304, 18944):
        steps = [record(lambda n=n, width=width: step(n, width)) for n in (1, 48, 1000, 100001)]
        kernels = {item.name: item for plan in steps for item in plan.specializations}
        assert len(sum(steps[1:], steps[0]).on(target_of("sm_90"))) == len(kernels)
        assert kernels.keys() <= {"norm_fwd_kernel", "norm_bwd_kernel", "add_rows_kernel"}
