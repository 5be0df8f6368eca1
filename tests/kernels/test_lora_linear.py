"""Linear layers with adapters as one node, against their products one by one."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from strata_kernels.ops._launch import runs_triton
from strata_kernels.ops.float8 import cast as casts
from strata_kernels.ops.float8.linear import float8_stored_linear, quantize_weight
from strata_kernels.ops.lora import gated_layer
from strata_kernels.ops.lora.frozen_weight import ExactWeight, Float8Weight, Frozen, PackedWeight
from strata_kernels.ops.lora.gated_layer import lora_gated_layer
from strata_kernels.ops.lora.lora_linear import AdaptedLayer, lora_linear
from strata_kernels.ops.lora.low_rank import add_low_rank
from strata_kernels.ops.lora.seeded_dropout import seeded_dropout

# NumPy's, in the interpreter, of exponentials.
numpy = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SCALE = 2.0
# Outputs and ranks of the layers that read one input.
LAYERS = {"one": [(48, 4)], "three": [(64, 4), (32, 8), (16, 1)]}


class Counted:
    """A frozen weight, and how often it multiplied."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.exact, self.calls = ExactWeight(weight), 0
        self.outputs = weight.shape[0]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        self.calls += 1
        self.exact.multiply(x, bias, y)

    def add_input_gradient(self, dy: torch.Tensor, products: list[torch.Tensor]) -> None:
        self.exact.add_input_gradient(dy, products)


def tensors_of(
    sizes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, bias: bool
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    """x [2, 5, 32], factors A and B by turns, frozen weights, biases."""
    x = torch.randn(2, 5, 32).to(device, dtype)
    factors = [torch.randn(shape).div(4).to(device, dtype) for n, r in sizes for shape in ((r, 32), (n, r))]
    weights = [torch.randn(n, 32).to(device, dtype) for n, _ in sizes]
    return x, factors, weights, [torch.randn(n).to(device, dtype) if bias else None for n, _ in sizes]


def layers_of(
    frozen: list[Frozen], factors: list[torch.Tensor] | tuple[torch.Tensor, ...], biases: list[torch.Tensor | None]
) -> list[AdaptedLayer]:
    return [
        AdaptedLayer(weight, bias, a, b, SCALE)
        for weight, bias, a, b in zip(frozen, biases, factors[::2], factors[1::2], strict=True)
    ]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_results_and_gradients_are_those_of_the_steps(sizes, dtype, bias, compare, path, device, poisoned) -> None:
    if path == "interpreter" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies it wrongly")
    x, factors, weights, biases = tensors_of(sizes, dtype, device, bias)

    def ours(x: torch.Tensor, *factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cast = [ExactWeight(w.to(x.dtype)) for w in weights]
        return lora_linear(x, layers_of(cast, factors, [b if b is None else b.to(x.dtype) for b in biases]))

    def steps(x: torch.Tensor, *factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As PEFT computes them."""
        return tuple(
            functional.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
            + functional.linear(functional.linear(x, a), b) * SCALE
            for w, bias, a, b in zip(weights, biases, factors[::2], factors[1::2], strict=True)
        )

    compare(ours, steps, [x, *factors])


@numpy
@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("bias", "programs"), [(False, 1), (True, 8)], ids=["no bias, one sum", "bias, many sums"])
def test_a_gated_layer_is_its_steps(bias, programs, dtype, function, within_bar, device, poisoned, monkeypatch) -> None:
    """fp16, of which the kernels are the same as of bf16, because the interpreter multiplies that wrongly."""
    # Of 34 rows: one program walks down three tiles, or three have one each.
    monkeypatch.setattr(gated_layer, "_PROGRAMS", programs)
    sizes = [(272, 32, 4), (272, 32, 20), (24, 272, 1)]
    tensors = [torch.randn(2, 17, 32)]
    for n, k, r in sizes:
        tensors += [torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(r, k) / k**0.5, torch.randn(n, r) / 2]
    tensors = [tensor.to(dtype).to(device) for tensor in tensors]
    act = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}[function]

    def run(ours: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        x, *rest = (tensor.to(dtype).requires_grad_() for tensor in tensors)
        parts = [(rest[i].detach(), rest[i + 1].detach() if bias else None, *rest[i + 2 : i + 4]) for i in (0, 4, 8)]
        if ours:
            layers = [AdaptedLayer(ExactWeight(w), c, a, b, SCALE) for w, c, a, b in parts]
            y = lora_gated_layer(x, *layers, function)
        else:
            step = lambda x, w, c, a, b: functional.linear(x, w, c) + SCALE * (x @ a.t() @ b.t())  # noqa: E731
            y = step(act(step(x, *parts[0])) * step(x, *parts[1]), *parts[2])
        incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        leaves = [x, *(factor for *_, a, b in parts for factor in (a, b))]
        return [y.detach(), *torch.autograd.grad(y, leaves, incoming)]

    for found, steps, exact in zip(run(True, dtype), run(False, dtype), run(False, torch.float64), strict=True):
        within_bar(found, steps, exact, roundings=4)


@numpy
def test_a_gated_layer_notes_the_scales_of_its_casts(device, monkeypatch) -> None:
    x = torch.randn(17, 32, device=device).half()
    weights = [torch.randn(size, device=device).half() / 8 for size in ((48, 32), (48, 32), (32, 48))]
    packed = [Float8Weight(*quantize_weight(w)) for w in weights]
    factors = [
        [
            torch.randn(size, device=device).div(8).half().requires_grad_()
            for size in ((4, f.values.shape[1]), (f.outputs, 4))
        ]
        for f in packed
    ]
    results, looked = [], []
    plain = casts._Amax.apply
    monkeypatch.setattr(casts._Amax, "apply", lambda x: looked.append(x) or plain(x))
    for noting in (True, False):
        looked.clear()
        leaf = x.clone().requires_grad_()
        layers = [AdaptedLayer(f, None, a, b, SCALE) for f, (a, b) in zip(packed, factors, strict=True)]
        y = lora_gated_layer(leaf, *layers, "silu", in_fp8=noting)
        results.append([y, *torch.autograd.grad(y.float().square().mean(), [leaf, *(f for ab in factors for f in ab)])])
        # Those of x and of the result's gradient; and those of the activation and of the gradients of gate and up.
        assert len(looked) == (2 if noting and runs_triton(x) else 5)
    assert all(torch.equal(*pair) and pair[0].isfinite().all() for pair in zip(*results, strict=True))


@numpy
def test_a_gated_layer_keeps_its_frozen_products_and_what_is_narrow(device) -> None:
    x = torch.randn(17, 32, device=device).half().requires_grad_()
    sizes = [(48, 32), (48, 32), (32, 48)]
    weights = [torch.randn(size, device=device).div(8).half() for size in sizes]
    shapes = [((4, k), (n, 4)) for n, k in sizes]
    factors = [[torch.randn(shape, device=device).half().requires_grad_() for shape in pair] for pair in shapes]
    layers = [AdaptedLayer(ExactWeight(w), None, a, b, SCALE) for w, (a, b) in zip(weights, factors, strict=True)]
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y.shape) or y, lambda y: y):
        lora_gated_layer(x, *layers, "silu")
    assert sorted(shape for shape in kept if shape[0] == 17) == [(17, 4), (17, 8), (17, 32), (17, 48), (17, 48)]


@numpy
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_residual_is_added_to_the_result(dtype, gated, within_bar, device, poisoned) -> None:
    """One that is strided; fp16, because the interpreter multiplies bf16 wrongly."""
    sizes = [(48, 32, 4), (48, 32, 4), (32, 48, 4)] if gated else [(32, 32, 4)]
    shapes = [shape for n, k, r in sizes for shape in ((n, k), (r, k), (n, r))]
    weights = [torch.randn(shape).div(8).to(dtype).to(device) for shape in shapes]
    x, residual = (torch.randn(17, 2, 32).to(dtype).to(device) for _ in range(2))

    def run(ours: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, residual, *weights)]
        first, added, *rest = leaves
        first, added = first.transpose(0, 1).contiguous(), added.transpose(0, 1)
        triples = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
        layers = [AdaptedLayer(ExactWeight(w.detach()), None, a, b, SCALE) for w, a, b in triples]
        if ours and gated:
            y = lora_gated_layer(first, *layers, "silu", residual=added)
        elif ours:
            y = lora_linear(first, layers, residual=added)[0]
        else:
            step = lambda x, w, a, b: x @ w.detach().t() + SCALE * (x @ a.t() @ b.t())  # noqa: E731
            gate = step(first, *triples[0])
            y = added + (step(functional.silu(gate) * step(first, *triples[1]), *triples[2]) if gated else gate)
        incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        wanted = [*leaves[:2], *(factor for triple in triples for factor in triple[1:])]
        return [y.detach(), *torch.autograd.grad(y, wanted, incoming)]

    for found, steps, exact in zip(run(True, dtype), run(False, dtype), run(False, torch.float64), strict=True):
        within_bar(found, steps, exact, roundings=4)


def test_a_result_that_nothing_uses_and_an_input_without_gradient(device, poisoned) -> None:
    x, factors, weights, biases = tensors_of(LAYERS["three"], torch.float64, device, False)
    leaves = [factor.clone().requires_grad_() for factor in factors]
    first, _, last = lora_linear(x, layers_of(list(map(ExactWeight, weights)), leaves, biases))
    (first.sum() + last.square().sum()).backward()
    copies = [factor.clone().requires_grad_() for factor in factors]
    expected = [
        x @ w.t() + SCALE * x @ a.t() @ b.t() for w, a, b in zip(weights, copies[::2], copies[1::2], strict=True)
    ]
    (expected[0].sum() + expected[2].square().sum()).backward()
    # With gradients of zeros, weight decay would move them.
    assert leaves[2].grad is None and leaves[3].grad is None
    for i in (0, 1, 4, 5):
        torch.testing.assert_close(leaves[i].grad, copies[i].grad)


def test_gradients_that_are_strided(device, gradients) -> None:
    x, factors, weights, biases = tensors_of(LAYERS["one"], torch.float32, device, False)

    def flipped(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *inputs: compute(*inputs).transpose(0, 1)

    ours = lambda x, a, b: lora_linear(x, layers_of([ExactWeight(weights[0])], [a, b], biases))[0]  # noqa: E731
    steps = lambda x, a, b: x @ weights[0].t() + SCALE * (x @ a.t() @ b.t())  # noqa: E731
    for found, expected in zip(
        gradients(flipped(ours), [x, *factors]), gradients(flipped(steps), [x, *factors]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_x_is_kept_once_and_frozen_products_keep_nothing(device) -> None:
    x, factors, weights, biases = tensors_of(LAYERS["three"], torch.float32, device, False)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *factors)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(leaves[0], layers_of(list(map(ExactWeight, weights)), leaves[1:], biases))
    others = [t for t in kept if not any(t is leaf for leaf in leaves)]
    assert len(kept) == 8 and [tuple(t.shape) for t in others] == [(10, 13)]


def test_recomputation_leaves_out_the_last_products(device) -> None:
    x, factors, weights, biases = tensors_of(LAYERS["one"], torch.float32, device, False)
    frozen = Counted(weights[0])
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *factors)]
    layer = lambda x, *factors: lora_linear(x, layers_of([frozen], factors, biases))[0]  # noqa: E731
    found = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False).square().sum(), leaves)
    assert frozen.calls == 1
    for gradient, expected in zip(found, torch.autograd.grad(layer(*leaves).square().sum(), leaves), strict=True):
        assert torch.equal(gradient, expected)


def test_a_weight_of_another_form_gives_what_its_own_layer_does(device) -> None:
    """Results and the gradient of x of one layer whose adapter is zero."""
    x, (a, b), (w,), _ = tensors_of(LAYERS["one"], torch.float32, device, False)
    packed = quantize_weight(w)
    forms: dict[Frozen, Callable[[torch.Tensor], torch.Tensor]] = {
        Float8Weight(*packed): lambda x: float8_stored_linear(x, *packed),
        PackedWeight(48, lambda: w * 2): lambda x: functional.linear(x, w * 2),
    }
    for frozen, layer in forms.items():
        results = []
        for multiply in (layer, lambda x, f=frozen: lora_linear(x, layers_of([f], [a, b * 0], [None]))[0]):
            leaf = x.clone().requires_grad_()
            y = multiply(leaf)
            results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 1), (70, 264, 5), (33, 520, 48), (3, 16, 96)], ids=str)
def test_a_product_of_low_rank_is_added_and_rounded_once(shape, transposed, others, device) -> None:
    rows, columns, rank = shape
    # The interpreter multiplies bf16 wrongly.
    make = lambda *size: torch.randn(size, device=device).half()  # noqa: E731
    y, h, *added = make(rows, columns), make(rows, 2 * rank)[:, rank:], *(make(rows, columns) for _ in range(others))
    b = make(columns, rank).t() if transposed else make(rank, columns)
    exact = y.double() + sum(x.double() for x in added) + 0.5 * h.double() @ b.double()
    found = add_low_rank(y, h, b, 0.5, added)
    assert found.data_ptr() == y.data_ptr()
    roundings = 1 if runs_triton(y) and rank <= 64 else others + 2
    torch.testing.assert_close(found.double(), exact, rtol=2**-10 * roundings, atol=2**-9 * roundings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1021), (5, 4099), (0,)], ids=str)
def test_dropout_is_that_of_its_seed(shape, dtype, device, poisoned) -> None:
    x, base = torch.randn(2, *shape, device=device).to(dtype)
    seeds = [torch.randint(2**62, (1,), device=device) for _ in range(2)]
    keep = seeded_dropout(torch.ones_like(x), seeds[0], 0.25).bool()
    expected = torch.where(keep, x.float() / 0.75, 0)
    # The interpreter truncates where a GPU rounds to bf16.
    close = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(seeded_dropout(x, seeds[0], 0.25).float(), expected, **close)
    added = seeded_dropout(x, seeds[0], 0.25, base=base).float()
    torch.testing.assert_close(
        added, expected + base.float(), rtol=2**-7, atol=2**-7 if dtype == torch.bfloat16 else 1e-6
    )
    if x.numel() > 1000:
        assert 0.7 < keep.float().mean() < 0.8
        assert not torch.equal(keep, seeded_dropout(torch.ones_like(x), seeds[1], 0.25).bool())


def test_whether_an_element_is_kept_says_nothing_of_others(device) -> None:
    """As of independent draws: four standard deviations, at the distances at which a program repeats itself."""
    n = 1 << 17
    seed = torch.full((1,), 2**40 + 7, device=device)
    keep = seeded_dropout(torch.ones(n, device=device), seed, 0.5).bool().double() - 0.5
    assert abs(keep.mean()) < 4 * 0.5 / n**0.5
    for distance in (1, 2, 4, 32, 256, 1024, 2048, 3072, 4096, 8192):
        together = (keep[distance:] * keep[:-distance]).mean() / 0.25
        assert abs(together) < 4 / (n - distance) ** 0.5, distance


def test_gradients_with_dropout_are_those_of_masks_that_are_kept(device) -> None:
    x, factors, weights, biases = tensors_of(LAYERS["three"], torch.float32, device, False)
    torch.manual_seed(3)
    seeds = [torch.randint(2**62, (1,), device=device) for _ in range(3)]
    masks = [seeded_dropout(torch.ones(10, 32, device=device), seed, 0.5).view_as(x) for seed in seeds]
    results = []
    for ours in (True, False):
        torch.manual_seed(3)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *factors)]
        if ours:
            ys = lora_linear(leaves[0], layers_of(list(map(ExactWeight, weights)), leaves[1:], biases), dropout=0.5)
        else:
            parts = zip(weights, masks, leaves[1::2], leaves[2::2], strict=True)
            ys = tuple(leaves[0] @ w.t() + SCALE * ((leaves[0] * mask) @ a.t() @ b.t()) for w, mask, a, b in parts)
        results.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_factors_that_do_not_fit(device) -> None:
    x, (a, b), (w,), _ = tensors_of(LAYERS["one"], torch.float32, device, False)
    for wrong in ((a[:, 1:], b), (a, b[1:]), (a, b[:, 1:]), (a.double(), b)):
        with pytest.raises(ValueError, match=r"a must be \[R, 32\] and b \[48, R\], float32 like x, got"):
            lora_linear(x, layers_of([ExactWeight(w)], list(wrong), [None]))


def test_it_is_differentiable_once(device) -> None:
    x, (a, b), (w,), _ = tensors_of(LAYERS["one"], torch.float32, device, False)
    y = lora_linear(x, layers_of([ExactWeight(w)], [a.requires_grad_(), b], [None]))[0]
    with pytest.raises(NotImplementedError, match="lora_linear can be differentiated only once"):
        torch.autograd.grad(y.sum(), a, create_graph=True)
