"""qk_norm_rope against what transformers' Qwen3 and Gemma 3 do, in the same dtype and in fp64."""

import functools
import os

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from strata_kernels import qk_norm_rope
from strata_kernels.ops.rotary.cos_sin import CosSin
from strata_kernels.warmup import record

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# Cast mode → offset of the family that has it.
CASTS = {"llama": 0.0, "gemma": 1.0, "none": 0.0}


def norm(x: Tensor, weight: Tensor, cast: str, offset: float) -> Tensor:
    """As the family writes it; at least in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + EPS)
    if cast == "gemma":
        return (x.to(wide) * rstd * (offset + weight.to(wide))).to(x.dtype)
    if cast == "none":
        return (offset + weight) * (x * rstd.to(x.dtype))
    return (offset + weight) * (x.to(wide) * rstd).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x: [B, H, S, D]; cos, sin: [B or 1, S, P], one per pair."""
    pairs = cos.shape[-1]
    cos, sin = (a[:, None].to(x.dtype) for a in (cos, sin))
    if interleaved:
        x1, x2 = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((turned, x[..., 2 * pairs :]), -1)


def plain(q, k, q_weight, k_weight, *, cos, sin, cast="llama", offset=0.0, interleaved=False):
    pairs = ((q, q_weight), (k, k_weight))
    return tuple(rotate(norm(x, weight, cast, offset), cos, sin, interleaved) for x, weight in pairs)


def per_pair(batch: int, n_s: int, pairs: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = (torch.arange(n_s, device=device) + 3 * torch.arange(batch, device=device)[:, None]) % 7
    angle = positions[..., None] * 100.0 ** -(torch.arange(pairs, device=device) / pairs)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def tensors(shape_q, heads_k, dtype, device, weight_dtype=None):
    """q and k as attention has them, [B, H, S, D] views of [B, S, H, D] memory, and their weights."""
    b, h, s, d = shape_q
    q, k = (torch.randn(b, s, n, d, device=device).to(dtype).transpose(1, 2) for n in (h, heads_k))
    return [q, k, *(torch.randn(d, device=device).to(weight_dtype or dtype) for _ in range(2))]


# Batch, query heads, positions, features; key heads; pairs that turn.
CASES = [
    ((1, 1, 1, 2), 1, 1),
    ((2, 4, 7, 16), 2, 8),
    ((1, 3, 47, 24), 1, 12),
    ((2, 5, 9, 32), 2, 6),
    ((1, 2, 3, 256), 1, 128),
]
# The sweep of head sizes, at lengths that end within a tile; only a GPU has the time for it.
FULL = [((2, 32, 1027, d), 8, p) for d, p in ((64, 32), (80, 16), (96, 48), (128, 64), (192, 96), (256, 32))]
CASES += FULL * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_fp64(case, dtype, device, compare, poisoned) -> None:
    shape, heads_k, pairs = case
    cos, sin = per_pair(shape[0], shape[2], pairs, dtype, device)
    ours = functools.partial(qk_norm_rope, cos=cos, sin=sin, rotary_dim=2 * pairs, eps=EPS)
    compare(ours, functools.partial(plain, cos=cos, sin=sin), tensors(shape, heads_k, dtype, device))


@pytest.mark.parametrize("cast", ["gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts(dtype, cast, device, compare) -> None:
    cos, sin = per_pair(2, 7, 8, dtype, device)
    options = {"cast": cast, "offset": CASTS[cast]}
    ours = functools.partial(qk_norm_rope, cos=cos, sin=sin, rotary_dim=16, eps=EPS, **options)
    inputs = tensors((2, 4, 7, 16), 2, dtype, device)
    compare(ours, functools.partial(plain, cos=cos, sin=sin, **options), inputs)


@pytest.mark.parametrize("cast", CASTS)
def test_weights_of_a_wider_dtype(cast, device, compare) -> None:
    cos, sin = per_pair(2, 5, 8, torch.float32, device)
    options = {"cast": cast, "offset": CASTS[cast]}
    ours = functools.partial(qk_norm_rope, cos=cos, sin=sin, rotary_dim=16, eps=EPS, **options)
    inputs = tensors((2, 3, 5, 16), 2, torch.float16, device, torch.float32)
    y = compare(ours, functools.partial(plain, cos=cos, sin=sin, **options), inputs)[0]
    assert y.dtype == (torch.float16 if cast == "gemma" else torch.float32)


@pytest.mark.parametrize("form", ["interleaved", "complex", "positions", "sections"])
@pytest.mark.parametrize("features", [16, 24])
def test_forms_of_the_angles(form, features, device, compare, poisoned) -> None:
    cos, sin = per_pair(2, 5, 8, torch.float32, device)
    torchs = functools.partial(plain, cos=cos, sin=sin, interleaved=form in ("interleaved", "complex"))
    three = [torch.stack([a if axis == i else a * 9 for axis in range(3)]) for i, a in enumerate((cos, sin))]
    given, options = {
        "interleaved": ([a.repeat_interleave(2, -1) for a in (cos, sin)], {"interleaved": True}),
        "complex": ([torch.complex(cos, sin)], {"interleaved": True}),
        "positions": ([a.flatten(0, 1).flip(0) for a in (cos, sin)], {"rotary_dim": 16}),
        "sections": (three, {"rotary_dim": 16, "mrope_section": [3, 3, 2]}),
    }[form]
    if form == "positions":
        options["positions"] = torch.arange(9, -1, -1, device=device).view(2, 5)
    if form == "sections":
        torchs = functools.partial(plain, **{
            name: torch.cat([a[axis] for axis, a in enumerate(x.split([3, 3, 2], -1))], -1)
            for name, x in zip(("cos", "sin"), three, strict=True)
        })  # fmt: skip
    inputs = tensors((2, 3, 5, features), 1, torch.float32, device)
    compare(lambda *x: qk_norm_rope(*x, *given, eps=EPS, **options), torchs, inputs)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype, scale, device, compare) -> None:
    cos, sin = per_pair(1, 6, 8, dtype, device)
    q, k, *weights = tensors((1, 2, 6, 16), 2, torch.float32, device)
    inputs = [(scale * x).to(dtype) for x in (q, k)] + [w.to(dtype) for w in weights]
    ours = functools.partial(qk_norm_rope, cos=cos, sin=sin, rotary_dim=16, eps=EPS)
    compare(ours, functools.partial(plain, cos=cos, sin=sin), inputs)


@pytest.mark.filterwarnings(
    "ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)  # the interpreter
def test_rows_of_zeros_without_epsilon_leave_the_others_alone(device) -> None:
    """What does not exist is not added to the gradient of the weights."""
    cos, sin = per_pair(1, 3, 4, torch.float32, device)
    inputs = [x.requires_grad_() for x in tensors((1, 3, 3, 8), 1, torch.float32, device)]
    y = qk_norm_rope(*inputs, cos, sin, rotary_dim=8, eps=0.0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y, inputs, [torch.ones_like(x) for x in y]))


STRIDED = {
    "heads before positions": lambda q, k: (q.contiguous(), k.contiguous()),
    "one of each": lambda q, k: (q.contiguous(), k),
    "parts of one projection": lambda q, k: (
        torch.cat((q, k), 1).transpose(1, 2).contiguous().transpose(1, 2).split(4, 1)
    ),
    "odd addresses": lambda q, k: (q[..., 1:31], k[..., 1:31]),
    "every other feature": lambda q, k: (q[..., ::2], k[..., ::2]),
    "broadcast": lambda q, k: (q[:1].expand(2, -1, -1, -1), k),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, device, compare, poisoned) -> None:
    q, k, *weights = tensors((2, 4, 5, 32), 4, torch.float32, device)
    q, k = view(q, k)
    weights = [w.repeat_interleave(2)[::2][: q.shape[-1]] for w in weights]
    cos, sin = per_pair(1, 5, q.shape[-1] // 2, torch.float32, device)
    ours = functools.partial(qk_norm_rope, cos=cos, sin=sin, rotary_dim=q.shape[-1], eps=EPS)
    compare(ours, functools.partial(plain, cos=cos, sin=sin), [q, k, *weights])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)], ids=["batch", "heads", "positions"])
def test_rows_far_apart(order, far, gradients) -> None:
    x = far(3, 1, 2, 8).permute(order)
    y = torch.randn(x.shape, device=x.device).bfloat16()
    weights = [torch.randn(8, device=x.device).bfloat16() for _ in range(2)]
    cos, sin = per_pair(1, x.shape[2], 4, torch.float32, x.device)
    for i in range(2):
        given, dense = (
            gradients(lambda *a: qk_norm_rope(*a, cos, sin, rotary_dim=8), [*[z, y][:: 1 - 2 * i], *weights])
            for z in (x, x.clone())
        )
        assert all(torch.equal(a, b) for a, b in zip(given, dense, strict=True))


def test_layouts_agree_and_keep_the_memory_layout(device) -> None:
    q, k, *weights = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = per_pair(1, 6, 8, torch.float32, device)
    run = functools.partial(qk_norm_rope, rotary_dim=16)
    y_q, y_k = run(q, k, *weights, cos, sin)
    z_q, z_k = run(q.transpose(1, 2), k.transpose(1, 2), *weights, cos, sin, layout="bshd")
    assert torch.equal(y_q, z_q.transpose(1, 2)) and torch.equal(y_k, z_k.transpose(1, 2))
    assert y_q.stride() == q.stride() and z_q.is_contiguous()
    w_q, w_k = run(q[1].transpose(0, 1), k[1].transpose(0, 1), *weights, cos, sin, layout="thd")
    assert torch.equal(w_q, z_q[1]) and torch.equal(w_k, z_k[1])


def test_backward_of_one_result_alone_and_frozen_weights(device) -> None:
    q, k, *weights = tensors((1, 2, 5, 8), 2, torch.float32, device)
    cos, sin = per_pair(1, 5, 4, torch.float32, device)
    q.requires_grad_()
    frozen = torch.autograd.grad(qk_norm_rope(q, k, *weights, cos, sin, rotary_dim=8)[0].sum(), q)[0]
    leaves = [x.requires_grad_() for x in (q, k, *weights)]
    trained = torch.autograd.grad(qk_norm_rope(*leaves, cos, sin, rotary_dim=8)[0].sum(), leaves)
    # Two kernels, in which other sums and products are contracted.
    torch.testing.assert_close(trained[0], frozen)
    assert trained[2].count_nonzero() == 8
    assert trained[1].count_nonzero() == trained[3].count_nonzero() == 0


def test_repeats_bit_for_bit(device, gradients) -> None:
    cos, sin = per_pair(2, 33, 8, torch.float32, device)
    inputs = tensors((2, 4, 33, 16), 2, torch.bfloat16, device)
    runs = [gradients(lambda *x: qk_norm_rope(*x, cos, sin, rotary_dim=16), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_same_tensors_twice(device) -> None:
    x = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    cos, sin = per_pair(1, 5, 4, torch.float32, device)
    y, z = qk_norm_rope(x, x, weight, weight, cos, sin, rotary_dim=8)
    twice = torch.autograd.grad(y.sum() + z.sum(), (x, weight))
    y, _ = qk_norm_rope(x, x[:, :0], weight, weight, cos, sin, rotary_dim=8)
    once = torch.autograd.grad(y.sum(), (x, weight))
    torch.testing.assert_close(twice, tuple(2 * g for g in once))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)], ids=str)
def test_no_elements(shape, device, poisoned) -> None:
    inputs = [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)]
    inputs += [torch.ones(8, device=device, requires_grad=True) for _ in range(2)]
    cos, sin = per_pair(1, shape[2], 4, torch.float32, device)
    y = qk_norm_rope(*inputs, cos, sin, rotary_dim=8)
    grads = torch.autograd.grad(y, inputs, [torch.ones_like(x) for x in y])
    assert y[0].shape == grads[0].shape == shape
    assert grads[2].count_nonzero() == grads[3].count_nonzero() == 0


def test_fp64_is_differentiated_exactly(device) -> None:
    inputs = [x.requires_grad_() for x in tensors((1, 2, 3, 4), 1, torch.float64, device)]
    cos, sin = per_pair(1, 3, 1, torch.float64, device)
    assert torch.autograd.gradcheck(lambda *x: qk_norm_rope(*x, cos, sin, rotary_dim=2, offset=1.0), inputs)


def test_function_transforms(device) -> None:
    inputs = tensors((2, 3, 5, 12), 1, torch.float32, device)
    cos, sin = per_pair(1, 5, 4, torch.float32, device)

    def loss(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        y_q, y_k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, rotary_dim=8)
        return y_q.cos().sum() + y_k.sin().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*leaves), leaves))


def test_checkpointed_equals_stored(device, gradients) -> None:
    cos, sin = per_pair(1, 5, 4, torch.float32, device)
    inputs = tensors((1, 2, 5, 8), 1, torch.float32, device)

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*x, cos, sin, rotary_dim=8)

    def again(*x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)

    once, twice = (gradients(f, inputs) for f in (run, again))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is compiled is the same")
def test_compiled_equals_eager(device, gradients) -> None:
    """Once for lengths that vary."""

    def function(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor):
        q, k = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin)
        return q.cos(), k.sin()

    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=frames, dynamic=True)
    counts = []
    for n_s in (7, 12):
        cos, sin = (a.repeat(1, 1, 2) for a in per_pair(1, n_s, 4, torch.float32, device))
        inputs = [torch.randn(2, n_s, heads, 8, device=device) for heads in (4, 2)]
        inputs += [torch.randn(8, device=device) for _ in range(2)]
        eager, traced = (gradients(functools.partial(f, cos=cos, sin=sin), inputs) for f in (function, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
        counts.append(frames.frame_count)
    assert counts[0] == counts[-1]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is registered is the same")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    inputs = [x.requires_grad_() for x in tensors((2, 2, 3, 8), 1, torch.float32, device)]
    cos, sin = per_pair(1, 3, 4, torch.float32, device)
    given = CosSin(cos[None], sin[None], None, 8, False, 0, 0, 0, False)
    torch.library.opcheck(torch.ops.strata.qk_norm_rope.default, (*inputs, EPS, 0.0, "llama", *given))


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_three_kernels_serve_every_shape_of_a_model() -> None:
    def step(batch: int, n_s: int) -> None:
        q, k = (torch.empty(batch, n_s, n, 64, device="meta", requires_grad=True).transpose(1, 2) for n in (12, 2))
        weights = [torch.empty(64, device="meta", requires_grad=True) for _ in range(2)]
        y = qk_norm_rope(q, k, *weights, *torch.empty(2, batch, n_s, 64, device="meta"))
        torch.autograd.backward(y, [torch.empty_like(x).contiguous() for x in y])

    plans = [record(lambda s=s: step(*s)) for s in ((2, 64), (1, 61), (3, 2000))]
    assert [item.name for item in plans[0].specializations] == [
        "qk_norm_rope_fwd_kernel",
        "qk_norm_rope_bwd_kernel",
        "qk_norm_rope_dw_kernel",
    ]
    assert len(sum(plans[1:], plans[0])) == 3


Q, K, WEIGHT, ANGLE = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 3, 8), torch.ones(8), torch.ones(3, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((Q[0], K, WEIGHT, WEIGHT, ANGLE, ANGLE), {}, r"must be \[B, H, S, D\] \(bhsd\)"),
        ((Q, K, WEIGHT[:4], WEIGHT, ANGLE, ANGLE), {}, r"q_weight must be .* of shape \[8\], got float32 \[4\]"),
        ((Q, K, WEIGHT, WEIGHT.int(), ANGLE, ANGLE), {}, "k_weight must be .* got int32"),
        ((Q, K, WEIGHT, WEIGHT.to("meta"), ANGLE, ANGLE), {}, "k_weight is on meta and q on cpu"),
        (
            (Q, K, WEIGHT, WEIGHT.bfloat16(), ANGLE, ANGLE),
            {},
            "q_weight is torch.float32 and k_weight torch.bfloat16: convert one of them",
        ),
        ((Q, K, WEIGHT, WEIGHT, ANGLE, ANGLE), {"cast": "qwen"}, "one of llama, gemma, none, got 'qwen'"),
        ((Q, K, WEIGHT, WEIGHT, ANGLE[:2], ANGLE[:2]), {}, r"\[3, R\] or \[2, 3, R\]"),
        ((Q, K, WEIGHT, WEIGHT, ANGLE), {}, "a complex tensor as cos"),
    ],
)
def test_wrong_arguments(args, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(*args, **kwargs)
