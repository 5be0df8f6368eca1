"""experts against a dense sum over all experts, in the same dtype and in fp64, and against transformers' own code."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from strata_kernels import experts
from strata_kernels.ops._launch import recording
from strata_kernels.ops.experts import experts_launch, experts_reference
from strata_kernels.warmup import record

INTERPRETED = "TRITON_INTERPRET" in os.environ
host = pytest.mark.skipif(INTERPRETED, reason="has been tested without the interpreter")
# The interpreter's product of bf16 is wrong.
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
GPT_OSS = {"gate": "interleaved", "alpha": 1.702, "limit": 1.5, "offset": 1.0}


def plain(
    x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *biases: Tensor, index: Tensor, gate: str = "halves",
    activation: str = "silu", alpha: float = 1.0, limit: float = float("inf"), offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """A loop over experts that takes every token through every expert and keeps what was routed."""
    function, slots = FUNCTIONS[activation], []
    for e in range(gate_up.shape[0]):
        h = functional.linear(x, gate_up[e], biases[0][e] if biases else None)
        if gate == "none":
            a = function(h)
        else:
            g, u = (h[..., ::2], h[..., 1::2]) if gate == "interleaved" else h.chunk(2, dim=-1)
            a = function(alpha * g.clamp(max=limit)) / alpha * (u.clamp(-limit, limit) + offset)
        slots.append(functional.linear(a, down[e], biases[1][e] if biases else None))
    known = torch.where((index < 0) | (index >= len(slots)), len(slots), index.long())
    routed = functional.one_hot(known, len(slots) + 1)
    weights = (routed[..., :-1] * router[..., None]).sum(1)
    return torch.einsum("te,eth->th", weights.to(x.dtype), torch.stack(slots))


def inputs_of(
    tokens: int, width: int, inner: int, count: int, k: int, dtype: torch.dtype, device: torch.device, *,
    gate: str = "halves", bias: bool = False,
) -> list[Tensor]:  # fmt: skip
    up = inner if gate == "none" else 2 * inner
    shapes = [(tokens, width), (count, up, width), (count, width, inner), (tokens, k)]
    shapes += [(count, up), (count, width)] if bias else []
    scales = [1.0, width**-0.5, inner**-0.5, 1.0, 1.0, 1.0]
    return [(s * torch.randn(shape)).to(device, dtype) for s, shape in zip(scales, shapes, strict=False)]


def mixture(index: Tensor, **options: object):
    def run(x: Tensor, gate_up: Tensor, down: Tensor, router: Tensor, *biases: Tensor) -> Tensor:
        named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
        return experts(x, gate_up, down, index, router, **named, **options)

    return run


# h, a and y are rounded on the way, and as many gradients.
ROUNDINGS = 3


def hold(index: Tensor, inputs: list[Tensor], within_bar, gradients, **options: object) -> None:
    """The bar for the result and every gradient."""
    mine, theirs = (
        gradients(mixture(index, **options), inputs),
        gradients(partial(plain, index=index, **options), inputs),
    )
    truth = gradients(partial(plain, index=index, **options), [x.double() for x in inputs])
    for results in zip(mine, theirs, truth, strict=True):
        within_bar(*results, roundings=ROUNDINGS)


# Ragged, several tiles of rows and features, one token, one expert, as many experts as a token has slots.
SHAPES = [(7, 24, 16, 4, 2), (1, 8, 8, 3, 3), (70, 40, 72, 3, 2), (5, 16, 8, 1, 1), (9, 136, 8, 8, 8)]
SHAPES += [(3000, 264, 328, 8, 3), (5000, 512, 256, 16, 4), (2000, 1000, 130, 9, 8)] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, device, within_bar, gradients, poisoned) -> None:
    tokens, _, _, count, k = shape
    index = torch.rand(tokens, count).topk(k).indices.to(device)
    hold(index, inputs_of(*shape, dtype, device), within_bar, gradients)


ROUTINGS = {
    "all on one expert": lambda: torch.full((70, 1), 1),
    "the first and the last have none": lambda: torch.randint(1, 3, (20, 2)),
    "an expert twice": lambda: torch.tensor([[0, 0], [2, 2], [1, 3]]),
    "no expert": lambda: torch.tensor([[0, 4], [4, 4], [-1, 2], [1, 3]]),
    "nowhere": lambda: torch.full((3, 2), 4),
    "32 bits": lambda: torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing, device, within_bar, gradients, poisoned) -> None:
    index = ROUTINGS[routing]().to(device)
    inputs = inputs_of(len(index), 24, 16, 4, index.shape[1], torch.float32, device, bias=True)
    hold(index, inputs, within_bar, gradients)


@pytest.mark.parametrize("rows", [39, 26, 9, 1], ids=["spare", "exact", "too few", "one"])
def test_rows_for_the_slots_of_own_experts_alone(rows, device, within_bar, gradients, poisoned) -> None:
    """Of 60 slots 26 name an expert. If rows are short, slots in the order of experts get them."""
    index = (torch.arange(60) % 7 - 2).view(20, 3)
    assert ((index >= 0) & (index < 3)).sum() == 26
    order = torch.where((index < 0) | (index > 2), 3, index).flatten().argsort(stable=True)
    left = index.flatten().clone()
    left[order[min(rows, 26) :]] = -1
    inputs = inputs_of(20, 24, 16, 3, 3, torch.float32, device, bias=True)
    mine = gradients(mixture(index.to(device), max_slots=rows), inputs)
    theirs = partial(plain, index=left.view(20, 3).to(device))
    truth = gradients(theirs, [x.double() for x in inputs])
    for results in zip(mine, gradients(theirs, inputs), truth, strict=True):
        within_bar(*results, roundings=ROUNDINGS)


@host
def test_a_recomputed_layer_stops_before_the_last_product(monkeypatch) -> None:
    """The backward pass does not need the result, so it is computed once; gradients have the same bits."""
    sums = []
    plain_sums = experts_reference.token_sums
    monkeypatch.setattr(experts_reference, "token_sums", lambda *args: sums.append(1) or plain_sums(*args))
    index, (x, *weights) = torch.randint(4, (7, 2)), inputs_of(7, 24, 16, 4, 2, torch.float32, torch.device("cpu"))
    inputs = [tensor.requires_grad_() for tensor in (x, *weights)]

    def layer(x: Tensor) -> Tensor:
        return x + mixture(index)(x, *weights)

    whole = torch.autograd.grad(layer(x).square().sum(), inputs)
    # That of the result, and of the gradient of x.
    assert len(sums) == 2
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), inputs)
    assert len(sums) == 4
    assert all(map(torch.equal, whole, again))


@host
def test_keeps_as_much_of_h_as_there_are_rows() -> None:
    leaves = [x.requires_grad_() for x in inputs_of(32, 48, 16, 4, 4, torch.bfloat16, "cpu")]
    index, saved = torch.arange(128).view(32, 4) % 16, list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        mixture(index, max_slots=40)(*leaves)
    assert [tuple(x.shape) for x in saved if x.shape[-1:] == (32,) and x.dtype == torch.bfloat16] == [(40, 32)]


GATES = {
    "gpt-oss": GPT_OSS,
    "clamped": {"limit": 1.0},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh", "gate": "interleaved"},
    "relu2 without a gate": {"gate": "none", "activation": "relu2"},
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gate", GATES)
def test_any_gate(gate, bias, device, within_bar, gradients, poisoned) -> None:
    options, index = GATES[gate], torch.randint(0, 3, (11, 2)).to(device)
    inputs = inputs_of(11, 40, 24, 3, 2, torch.float32, device, gate=options.get("gate", "halves"), bias=bias)
    hold(index, inputs, within_bar, gradients, **options)


def test_weights_stored_the_other_way_around(device) -> None:
    """As gpt-oss stores them: equal results, and gradients in the layout of the weights."""
    index = torch.randint(0, 3, (11, 2)).to(device)
    x, gate_up, down, router = inputs_of(11, 40, 24, 3, 2, torch.float32, device)
    stored = [w.transpose(1, 2).contiguous().requires_grad_() for w in (gate_up, down)]
    y = experts(x, stored[0].transpose(1, 2), stored[1].transpose(1, 2), index, router)
    leaves = [w.requires_grad_() for w in (gate_up, down)]
    expected = experts(x, *leaves, index, router)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    for given, wanted in zip(
        torch.autograd.grad(y, stored, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        assert given.is_contiguous()
        torch.testing.assert_close(given, wanted.transpose(1, 2))


def test_equal_inputs_give_equal_bits(device, gradients) -> None:
    index = torch.randint(0, 4, (70, 3)).to(device)
    inputs = inputs_of(70, 24, 16, 4, 3, torch.float32, device, bias=True)
    first, again = (gradients(mixture(index), inputs) for _ in "ab")
    assert all(map(torch.equal, first, again))


def test_the_order_of_tokens_changes_no_bit(device) -> None:
    """A token's result depends on no other token's: as for the same sample in another batch."""
    index = torch.randint(0, 4, (70, 3)).to(device)
    x, gate_up, down, router = inputs_of(70, 24, 16, 4, 3, torch.float32, device)
    order = torch.randperm(70).to(device)
    y = experts(x, gate_up, down, index, router)
    # The interpreter's products are NumPy's: on some processors the place of a row in them changes its bits.
    if device.type == "cuda":
        assert torch.equal(experts(x[order], gate_up, down, index[order], router[order]), y[order])
    else:
        torch.testing.assert_close(experts(x[order], gate_up, down, index[order], router[order]), y[order])


@pytest.mark.parametrize("trained", ["x", "gate_up", "down", "router", "gate_up_bias", "down_bias"])
def test_only_what_is_trained_gets_a_gradient(trained, device, gradients) -> None:
    names = ["x", "gate_up", "down", "router", "gate_up_bias", "down_bias"]
    index = torch.randint(0, 3, (5, 2)).to(device)
    inputs = inputs_of(5, 16, 8, 3, 2, torch.float32, device, bias=True)
    expected = gradients(mixture(index), inputs)[1 + names.index(trained)]
    leaves = [x.clone().requires_grad_(name == trained) for name, x in zip(names, inputs, strict=True)]
    y = mixture(index)(*leaves)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device, y.dtype))
    assert torch.equal(leaves[names.index(trained)].grad, expected)
    assert all(x.grad is None for name, x in zip(names, leaves, strict=True) if name != trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_weights_of_another_dtype(dtype, device) -> None:
    index = torch.randint(0, 3, (5, 2)).to(device)
    x, gate_up, down, router = inputs_of(5, 16, 8, 3, 2, torch.float32, device)
    other = router.to(torch.float16 if dtype == torch.float32 else dtype).requires_grad_()
    y = experts(x, gate_up, down, index, other)
    assert y.dtype == torch.float32 and torch.equal(y, experts(x, gate_up, down, index, other.detach().float()))
    (d_router,) = torch.autograd.grad(y.sum(), other)
    assert d_router.dtype == other.dtype


@host
def test_keeps_tokens_and_h_alone() -> None:
    """No copy of gathered tokens, of the activation or of what each expert gives: as much with 64 experts as with 2."""
    tokens, width, inner, k = 32, 48, 16, 4
    kept = []
    for count in (4, 64):
        index = torch.rand(tokens, count).topk(k).indices
        leaves = [x.requires_grad_() for x in inputs_of(tokens, width, inner, count, k, torch.bfloat16, "cpu")]
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            mixture(index)(*leaves)
        given = {x.data_ptr() for x in (*leaves, index)}
        others = {x.data_ptr(): x.nbytes for x in saved if x.is_floating_point() and x.data_ptr() not in given}
        kept.append(sum(others.values()))
    assert kept == [tokens * k * 2 * inner * 2] * 2


@host
def test_launches_depend_on_shapes_alone() -> None:
    """The host can start all kernels without knowing how many tokens an expert has."""

    def step(index: Tensor) -> None:
        meta = [x.to("meta").requires_grad_() for x in inputs_of(300, 64, 32, 8, 2, torch.bfloat16, "cpu")]
        experts(*meta[:3], index, meta[3]).backward(torch.empty(300, 64, dtype=torch.bfloat16, device="meta"))

    with recording() as calls:
        step(torch.empty(300, 2, dtype=torch.int64, device="meta"))
    names = [call.kernel.__name__ for call in calls]
    assert names == [
        "count_kernel", "scan_kernel", "tile_kernel", "place_kernel", "rows_kernel", "gate_kernel", "rows_kernel",
        "token_sum_kernel", "rows_kernel", "gate_bwd_kernel", "weight_bwd_kernel", "rows_kernel", "token_sum_kernel",
        "weight_bwd_kernel",
    ]  # fmt: skip
    plans = [record(partial(step, torch.empty(300, 2, dtype=dtype, device="meta"))) for dtype in [torch.int64] * 2]
    assert plans[0] == plans[1] and len(plans[0]) <= len(names)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("count", [1, 3, 128])
def test_tiles_hold_every_routing(tokens, count) -> None:
    """The bound on tiles from shapes: reached where every expert but one has one row more than whole tiles."""
    index = torch.empty(tokens, 2, dtype=torch.int64, device="meta")
    tiles = experts_launch.empty_routing(index, count, torch.bfloat16).tiles.shape[0]
    bm, slots = experts_launch.tiles_of(2 * tokens, count, torch.bfloat16).rows.bm, 2 * tokens
    worst, left = 0, slots
    for _ in range(count - 1):
        worst, left = worst + (left > 0), left - (left > 0)
    assert worst + -(-left // bm) <= tiles


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.gpu
def test_never_waits_for_the_gpu() -> None:
    index = torch.randint(0, 8, (300, 2), device="cuda")
    leaves = [x.requires_grad_() for x in inputs_of(300, 64, 32, 8, 2, torch.bfloat16, "cuda", bias=True)]
    dy = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    mixture(index)(*leaves).backward(dy)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):  # one that is traced, and two that are replayed
            mixture(index)(*leaves).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@host
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 8)}, r"x must be .* of shape \[T, H\], got float32 \[2, 3, 8\]"),
        ({"x": torch.zeros(5, 8, dtype=torch.int64)}, "x must be"),
        ({"gate_up": torch.zeros(3, 7, 8)}, r"gate_up must have the shape \[E, 2 \* I, 8\], got float32 \[3, 7, 8\]"),
        ({"gate_up": torch.zeros(3, 8, 8).half()}, "gate_up must have the dtype of x, torch.float32, got float16"),
        ({"down": torch.zeros(3, 4, 8)}, r"down must have the shape \[3, 8, 4\], got float32 \[3, 4, 8\]"),
        ({"index": torch.zeros(4, 2, dtype=torch.int64)}, r"index must hold integers of shape \[5, K\]"),
        ({"index": torch.zeros(5, 2)}, "index must hold integers"),
        ({"weight": torch.zeros(5, 3)}, r"weight must be floating-point of shape \[5, 2\]"),
        ({"gate_up_bias": torch.zeros(3, 4)}, r"gate_up_bias must have the shape \[3, 8\]"),
        ({"down_bias": torch.zeros(8)}, r"down_bias must have the shape \[3, 8\]"),
        ({"activation": "tanh"}, "activation must be one of silu, gelu, gelu_tanh, relu2, got 'tanh'"),
        ({"gate": "left"}, "gate must be one of halves, interleaved, none, got 'left'"),
        ({"max_slots": 0}, "max_slots must be at least 1, got 0"),
        ({"gate": "none", "down": torch.zeros(3, 8, 8), "limit": 7.0}, "alpha, limit and offset need a gate"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_says_what_does_not_fit(change, message) -> None:
    given = {
        "x": torch.zeros(5, 8), "gate_up": torch.zeros(3, 8, 8), "down": torch.zeros(3, 8, 4),
        "index": torch.zeros(5, 2, dtype=torch.int64), "weight": torch.zeros(5, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        experts(**{**given, **change})
