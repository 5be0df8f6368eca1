"""experts with adapters against the sum of weights and adapters, in the same dtype and in fp64."""

import os
import weakref

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from strata_kernels import LowRank, experts
from strata_kernels.ops._launch import recording
from strata_kernels.patch.discover_experts import prove_experts
from strata_kernels.patch.experts_forward import experts_forward
from tests.kernels.test_experts import ROUTINGS, inputs_of, plain

INTERPRETED = "TRITON_INTERPRET" in os.environ
host = pytest.mark.skipif(INTERPRETED, reason="has been tested without the interpreter")
# The interpreter's product of bf16 is wrong.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows between the factors, h and a, y, and as many gradients.
ROUNDINGS = 4


def adapters_of(rank: int, *weights: Tensor) -> list[Tensor]:
    """a and b of each weight, b in the layout of PEFT's files: [N, R, E]."""
    made = []
    for weight in weights:
        count, outputs, inputs = weight.shape
        a = inputs**-0.5 * torch.randn(count, rank, inputs)
        b = 0.3 * torch.randn(outputs, rank, count)
        made += [a.to(weight), b.to(weight)]
    return made


def adapted(scale: float, index: Tensor, **options: object):
    def run(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *factors: Tensor) -> Tensor:
        of_up, of_down = (LowRank(a, b.permute(2, 0, 1), scale) for a, b in (factors[:2], factors[2:]))
        return experts(x, gate_up, down, index, router, gate_up_adapter=of_up, down_adapter=of_down, **options)

    return run


def merged(scale: float, index: Tensor, **options: object):
    """A loop over experts that takes the sums of weights and adapters."""

    def run(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *factors: Tensor) -> Tensor:
        sums = [
            weight + scale * torch.einsum("ore,eri->eoi", b, a)
            for weight, a, b in ((gate_up, *factors[:2]), (down, *factors[2:]))
        ]
        return plain(x, *sums, router, index=index, **options)

    return run


def hold(rank: int, index: Tensor, inputs: list[Tensor], within_bar, gradients, scale: float = 2.0, **options) -> None:
    inputs = [*inputs, *adapters_of(rank, inputs[1], inputs[2])]
    mine = gradients(adapted(scale, index, **options), inputs)
    theirs = gradients(merged(scale, index, **options), inputs)
    truth = gradients(merged(scale, index, **options), [x.double() for x in inputs])
    for results in zip(mine, theirs, truth, strict=True):
        # Products sum over features, or tokens.
        within_bar(*results, roundings=ROUNDINGS, terms=max(inputs[0].shape))


# (tokens, width, inner, experts, k), rank: ragged, several tiles, a rank above the features summed at a time.
SHAPES = [((7, 24, 16, 4, 2), 4), ((70, 40, 72, 3, 2), 1), ((9, 136, 8, 8, 8), 20), ((5, 16, 8, 1, 1), 70)]
SHAPES += [((3000, 264, 328, 8, 3), 16), ((5000, 512, 256, 16, 4), 64), ((2000, 256, 512, 8, 2), 200)] * (
    torch.cuda.is_available()
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rank"), SHAPES, ids=str)
def test_matches_fp64(shape, rank, dtype, device, within_bar, gradients, poisoned) -> None:
    tokens, _, _, count, k = shape
    index = torch.rand(tokens, count).topk(k).indices.to(device)
    hold(rank, index, inputs_of(*shape, dtype, device), within_bar, gradients)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing, device, within_bar, gradients, poisoned) -> None:
    index = ROUTINGS[routing]().to(device)
    inputs = inputs_of(len(index), 24, 16, 4, index.shape[1], torch.float32, device)
    hold(3, index, inputs, within_bar, gradients, scale=0.7)


NAMES = ["x", "gate_up", "down", "router", "gate_up a", "gate_up b", "down a", "down b"]


@pytest.mark.parametrize("trained", range(8), ids=NAMES.__getitem__)
def test_only_what_is_trained_gets_a_gradient(trained, device, gradients) -> None:
    index = torch.randint(0, 3, (5, 2)).to(device)
    inputs = inputs_of(5, 16, 8, 3, 2, torch.float32, device)
    inputs += adapters_of(4, inputs[1], inputs[2])
    expected = gradients(adapted(0.5, index), inputs)[1 + trained]
    leaves = [x.clone().requires_grad_(i == trained) for i, x in enumerate(inputs)]
    y = adapted(0.5, index)(*leaves)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device, y.dtype))
    assert torch.equal(leaves[trained].grad, expected)
    assert all(x.grad is None for i, x in enumerate(leaves) if i != trained)


@pytest.mark.parametrize("which", ["gate_up_adapter", "down_adapter"])
def test_an_adapter_of_one_weight(which, device) -> None:
    index = torch.randint(0, 3, (11, 2)).to(device)
    x, gate_up, down, router = inputs_of(11, 16, 8, 3, 2, torch.float32, device)
    a, b = adapters_of(4, gate_up if which == "gate_up_adapter" else down)
    y = experts(x, gate_up, down, index, router, **{which: LowRank(a, b.permute(2, 0, 1), 2.0)})
    added = 2.0 * torch.einsum("ore,eri->eoi", b, a)
    sums = (gate_up + added, down) if which == "gate_up_adapter" else (gate_up, down + added)
    torch.testing.assert_close(y, experts(x, *sums, index, router))


def test_equal_inputs_give_equal_bits(device, gradients) -> None:
    index = torch.randint(0, 4, (70, 3)).to(device)
    inputs = inputs_of(70, 24, 16, 4, 3, torch.float32, device)
    inputs += adapters_of(4, inputs[1], inputs[2])
    first, again = (gradients(adapted(2.0, index), inputs) for _ in "ab")
    assert all(map(torch.equal, first, again))


@host
def test_derivatives_of_derivatives() -> None:
    index = torch.randint(0, 2, (3, 2))
    inputs = inputs_of(3, 4, 3, 2, 2, torch.float64, torch.device("cpu"))
    inputs += adapters_of(2, inputs[1], inputs[2])
    run = adapted(1.5, index)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(run, leaves) and torch.autograd.gradgradcheck(run, leaves)
    for mine, theirs in zip(
        torch.func.grad(lambda *x: run(*x).sum(), tuple(range(8)))(*inputs),
        torch.func.grad(lambda *x: merged(1.5, index)(*x).sum(), tuple(range(8)))(*inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@host
def test_keeps_tokens_and_h_alone() -> None:
    """Whatever the granularity of the experts: no W + BA, no copy of gathered tokens, none between the factors."""
    kept = []
    for count, k, inner in ((4, 2, 32), (16, 8, 8)):
        index = torch.rand(64, count).topk(k).indices
        inputs = inputs_of(64, 48, inner, count, k, torch.bfloat16, "cpu")
        x, gate_up, down, router, *factors = [*inputs, *adapters_of(4, inputs[1], inputs[2])]
        leaves = [x.requires_grad_(), gate_up, down, router, *(factor.requires_grad_() for factor in factors)]
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            adapted(2.0, index)(*leaves)
        given = {t.data_ptr() for t in (*leaves, index)}
        others = {t.data_ptr(): t.nbytes for t in saved if t.is_floating_point() and t.data_ptr() not in given}
        kept.append(sum(others.values()))
    assert kept == [64 * 2 * 2 * 32 * 2] * 2


@host
def test_frozen_weights_cost_no_product() -> None:
    with recording() as calls:
        x, gate_up, down, router = (t.to("meta") for t in inputs_of(300, 64, 32, 8, 2, torch.bfloat16, "cpu"))
        factors = [t.to("meta").requires_grad_() for t in adapters_of(4, gate_up, down)]
        index = torch.empty(300, 2, dtype=torch.int64, device="meta")
        adapted(2.0, index)(x.requires_grad_(), gate_up, down, router, *factors).backward(x.detach())
    names = [call.kernel.__name__ for call in calls]
    # Two products forward and two backward; before, behind and for the gradients of four factors ten small ones.
    assert names.count("rows_kernel") == 4 + 6 and names.count("weight_bwd_kernel") == 4
    wide = [call for call in calls if call.kernel.__name__ == "weight_bwd_kernel" and call.kwargs["BN"] > 16]
    assert not wide


@host
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ((torch.zeros(3, 2, 9), torch.zeros(3, 8, 2), 1.0), r"gate_up_adapter.a must be \[3, 2, 8\], torch.float32"),
        ((torch.zeros(3, 2), torch.zeros(3, 8, 2), 1.0), r"gate_up_adapter.a must be \[3, R, 8\]"),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 8, 4), 1.0), r"gate_up_adapter.b must be \[3, 8, 2\]"),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 8, 2).half(), 1.0), "gate_up_adapter.b must be .*, got float16"),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 8, 2), float("nan")), "gate_up_adapter.scale must be a finite float"),
        ((torch.zeros(3, 2, 8), torch.zeros(3, 8, 2), 2), "gate_up_adapter.scale must be a finite float, got 2"),
    ],
    ids=["width", "dimensions", "rank", "dtype", "nan", "integer"],
)
def test_says_what_does_not_fit(adapter, message) -> None:
    x, gate_up, down = torch.zeros(5, 8), torch.zeros(3, 8, 8), torch.zeros(3, 8, 4)
    index = torch.zeros(5, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        experts(x, gate_up, down, index, torch.zeros(5, 2), gate_up_adapter=LowRank(*adapter))


@host
def test_weights_that_are_restored_are_not_kept() -> None:
    """A module with `restore_weight` restores both weights once forward and once backward, and no pass holds them."""
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    plain_one, other = (Qwen3MoeExperts(config) for _ in "ab")
    for weight, same in zip(plain_one.parameters(), other.parameters(), strict=True):
        torch.nn.init.normal_(weight, std=0.2)
        same.data = weight.data / 2
        same.requires_grad_(False)
    made = []

    def restore(name: str) -> Tensor:
        restored = 2 * getattr(other, name)
        made.append((name, weakref.ref(restored)))
        return restored

    other.restore_weight = restore
    recipe = prove_experts(other)
    forward = experts_forward(Qwen3MoeExperts.forward, recipe)
    x = torch.randn(6, 32, requires_grad=True)
    index, router = torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    y = forward(other, x, index, router)
    assert [name for name, _ in made] == ["gate_up_proj", "down_proj"] and not any(alive() for _, alive in made)
    expected = plain_one(x, index, router)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))
    assert len(made) == 4 and not any(alive() for _, alive in made)
