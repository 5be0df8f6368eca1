"""rope against PyTorch in the same dtype and in fp64."""

import functools
import os

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from strata_kernels import rope
from strata_kernels.ops._launch import recording
from strata_kernels.ops.rotary.cos_sin import CosSin
from strata_kernels.ops.rotary.heads import count_tiles
from strata_kernels.warmup import record

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x: [B, H, S, D] as `transformers` writes it; cos, sin: [B or 1, S, P], one per pair."""
    pairs = cos.shape[-1]
    cos, sin = (
        a[:, None].repeat_interleave(2, -1) if interleaved else a[:, None].repeat(1, 1, 1, 2) for a in (cos, sin)
    )
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., pairs:], turned[..., :pairs]), dim=-1)
    return torch.cat((turned * cos + other * sin, rest), dim=-1)


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    cos, sin = (a.to(q.dtype) for a in (cos, sin))
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def plain_complex(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama 4 writes it, for x: [B, S, H, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    angle = angle.to(torch.complex128 if wide == torch.float64 else torch.complex64)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2)).contiguous()) * angle[:, :, None]
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    return rotate(q), rotate(k)


def per_pair(positions: Tensor, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [*positions, P]."""
    frequency = 100.0 ** -(torch.arange(pairs, device=positions.device) / max(1, pairs))
    angle = positions[..., None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [*positions, R], as Llama has them."""
    cos, sin = (torch.cat((a, a), -1) for a in per_pair(positions, width // 2, dtype))
    return cos, sin


def positions_of(batch: int, n_s: int, device: torch.device) -> Tensor:
    """Other ones in every batch row."""
    return (torch.arange(n_s, device=device) + 3 * torch.arange(batch, device=device)[:, None]) % 7


def tensors(shape_q, heads_k, dtype, device):
    """q and k as attention has them: [B, H, S, D] views of [B, S, H, D] memory."""
    b, h, s, d = shape_q
    return [torch.randn(b, s, n, d, device=device).to(dtype).transpose(1, 2) for n in (h, heads_k)]


# Batch, query heads, positions, features; key heads; width of cos and sin; do the angles differ by batch row?
CASES = [
    ((1, 1, 1, 2), 1, 2, False),
    ((2, 4, 7, 16), 2, 16, False),
    ((2, 6, 5, 64), 1, 64, True),
    ((1, 3, 127, 24), 3, 24, True),
    ((2, 5, 9, 32), 2, 12, True),
    ((1, 32, 3, 128), 8, 128, False),
]
# The sweep of head sizes, at lengths that end within a program; only a GPU has the time for it.
FULL = [((2, 32, 1027, d), 8, r, True) for d, r in ((64, 64), (80, 32), (96, 96), (128, 64), (192, 192), (256, 64))]
CASES += FULL * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_fp64(case, dtype, device, compare, poisoned) -> None:
    shape, heads_k, width, batched = case
    positions = positions_of(shape[0] if batched else 1, shape[2], device)
    cos, sin = per_pair(positions, width // 2, dtype)
    ours = functools.partial(rope, cos=torch.cat((cos, cos), -1), sin=torch.cat((sin, sin), -1))
    compare(ours, functools.partial(plain, cos=cos, sin=sin), tensors(shape, heads_k, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [12, 16])
@pytest.mark.parametrize("form", ["once", "twice", "complex"])
def test_interleaved(form, features, dtype, device, compare, poisoned) -> None:
    """GLM, Cohere and, at full width, Llama 4."""
    cos, sin = per_pair(positions_of(2, 5, device), 6, torch.float32 if form == "complex" else dtype)
    forms = {
        "once": ((cos, sin), {"rotary_dim": 12}),
        "twice": ([a.repeat_interleave(2, -1) for a in (cos, sin)], {}),
        "complex": ((torch.complex(cos, sin),), {}) if form == "complex" else None,
    }
    given, options = forms[form]
    inputs = tensors((2, 3, 5, features), 1, dtype, device)
    torchs = functools.partial(plain, cos=cos, sin=sin, interleaved=True)
    if form == "complex" and features == 12:
        inputs = [x.transpose(1, 2) for x in inputs]
        options = {"layout": "bshd"}
        torchs = functools.partial(plain_complex, angle=given[0])
    compare(lambda q, k: rope(q, k, *given, interleaved=True, **options), torchs, inputs)


def test_complex_angles_of_halves(device, compare) -> None:
    cos, sin = per_pair(positions_of(1, 5, device), 4, torch.float32)
    conjugate = torch.complex(cos, -sin).conj()
    bound = [lambda q, k: rope(q, k, conjugate[0]), functools.partial(plain, cos=cos, sin=sin)]
    compare(*bound, tensors((2, 2, 5, 8), 2, torch.float32, device))


def in_sections(three: Tensor, sections: list[int]) -> Tensor:
    """[3, B, S, P] → [B, S, P], as Qwen2-VL puts it together."""
    return torch.cat([part[i] for i, part in enumerate(three.split(sections, dim=-1))], dim=-1)


def woven(three: Tensor, sections: list[int]) -> Tensor:
    """[3, B, S, P] → [B, S, P], as Qwen3-VL does."""
    one = three[0].clone()
    for axis in (1, 2):
        one[..., axis : 3 * sections[axis] : 3] = three[axis, ..., axis : 3 * sections[axis] : 3]
    return one


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("put_together", "sections"), [(in_sections, [2, 1, 3]), (in_sections, [4, 8, 4]), (woven, [7, 5, 4])]
)
def test_sections_of_mrope(put_together, sections, interleaved, device, compare, poisoned) -> None:
    pairs = sum(sections)
    positions = torch.stack([positions_of(2, 5, device) * scale for scale in (1, 3, 5)])
    cos, sin = per_pair(positions, pairs, torch.float32)
    given = [a.repeat_interleave(2, -1) if interleaved else torch.cat((a, a), -1) for a in (cos, sin)]
    options = {"mrope_section": sections, "mrope_interleaved": put_together is woven, "interleaved": interleaved}
    torchs = functools.partial(
        plain, cos=put_together(cos, sections), sin=put_together(sin, sections), interleaved=interleaved
    )
    inputs = tensors((2, 3, 5, 2 * pairs + 4), 1, torch.float32, device)
    compare(lambda q, k: rope(q, k, *given, **options), torchs, inputs)
    q, k = inputs
    shared = [a[:, 0] for a in given]
    expected = rope(q[:1], k[:1], *(a[:, :1] for a in given), **options)[0]
    assert torch.equal(rope(q, k, *shared, **options)[0][:1], expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_positions_index_a_table(layout, dtype, device, gradients, poisoned) -> None:
    """The rows of cos and sin that they name, in a packed batch those of its sequences."""
    q, k = tensors((1 if layout == "thd" else 2, 3, 9, 8), 2, torch.float32, device)
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3], device=device)
    positions = positions if layout == "thd" else torch.stack((positions, positions.flip(0)))
    table = angles(torch.arange(4, device=device), 8, torch.float32)
    inputs = {
        "bhsd": [q, k],
        "bshd": [x.transpose(1, 2) for x in (q, k)],
        "thd": [x[0].transpose(0, 1) for x in (q, k)],
    }
    picked = [a[positions] for a in table]
    by_position = functools.partial(rope, layout=layout, positions=positions.to(dtype))
    taken, indexed = (
        gradients(lambda q, k, f=f, a=a: f(q, k, *a), inputs[layout])
        for f, a in ((functools.partial(rope, layout=layout), picked), (by_position, table))
    )
    assert all(torch.equal(a, b) for a, b in zip(taken, indexed, strict=True))
    assert taken[0].stride() == inputs[layout][0].stride()


def test_a_position_outside_of_the_table_is_nan(device) -> None:
    q, k = tensors((1, 2, 4, 8), 1, torch.float32, device)
    table = angles(torch.arange(3, device=device), 8, torch.float32)
    y, _ = rope(q, k, *table, positions=torch.tensor([0, 3, -1, 2], device=device))
    assert y.isnan().all(-1)[0].tolist() == [[False, True, True, False]] * 2


@pytest.mark.parametrize("inverse", [False, True])
def test_inverse_rotates_back(inverse, device, compare) -> None:
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    inputs = tensors((2, 3, 5, 16), 1, torch.float32, device)
    back = rope(*rope(*inputs, cos, sin, inverse=inverse), cos, sin, inverse=not inverse)
    torch.testing.assert_close(list(back), inputs)
    compare(
        functools.partial(rope, cos=cos, sin=sin, inverse=True),
        functools.partial(plain, cos=cos[None, :, :4], sin=-sin[None, :, :4]),
        inputs,
    )


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype, scale, device, compare) -> None:
    cos, sin = per_pair(torch.arange(6, device=device)[None], 8, dtype)
    inputs = [(scale * x).to(dtype) for x in tensors((1, 2, 6, 16), 2, torch.float32, device)]
    ours = functools.partial(rope, cos=cos, sin=sin, rotary_dim=16)
    compare(ours, functools.partial(plain, cos=cos, sin=sin), inputs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_features_that_pass_through_may_be_anything(device) -> None:
    q, k = tensors((1, 2, 3, 16), 2, torch.float32, device)
    q[..., 8:] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0, 1, 2, 3, 4], device=device)
    y, _ = rope(q, k, *angles(torch.arange(3, device=device), 8, torch.float32))
    assert torch.equal(y[..., 8:].nan_to_num(7.0), q[..., 8:].nan_to_num(7.0)) and y[..., :8].isfinite().all()


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
    q, k = view(*tensors((2, 4, 9, 32), 4, torch.float32, device))
    cos, sin = per_pair(torch.arange(9, device=device)[None], q.shape[-1] // 2, torch.float32)
    ours = functools.partial(rope, cos=cos, sin=sin, rotary_dim=q.shape[-1])
    compare(ours, functools.partial(plain, cos=cos, sin=sin), [q, k])


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_parts_of_one_projection_are_not_copied(layout) -> None:
    """The kernel reads the projection's own memory."""
    qkv = torch.empty(2, 9, 4 + 2 + 2, 16, device="meta")
    q, k, _ = qkv.split((4, 2, 2), dim=2)
    if layout == "thd":
        q, k = q[0], k[0]
    elif layout == "bhsd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos = torch.empty(9, 16, device="meta")
    with recording() as calls:
        rope(q, k, cos, cos, layout=layout)
    (call,) = calls
    memory = qkv.untyped_storage()._cdata
    assert all(x.untyped_storage()._cdata == memory for x in call.args[:2])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)], ids=["batch", "heads", "positions"])
def test_rows_far_apart(order, far, gradients) -> None:
    x = far(3, 1, 2, 8).permute(order)
    y = torch.randn(x.shape, device=x.device).bfloat16()
    cos, sin = angles(torch.arange(x.shape[2], device=x.device), 8, torch.float32)
    for i in range(2):
        given, dense = (gradients(lambda q, k: rope(q, k, cos, sin), [z, y][:: 1 - 2 * i]) for z in (x, x.clone()))
        assert all(torch.equal(a, b) for a, b in zip(given, dense, strict=True))


def test_layouts_agree_and_keep_the_memory_layout(device) -> None:
    q, k = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = angles(torch.arange(6, device=device), 16, torch.float32)
    y_q, y_k = rope(q, k, cos, sin)
    z_q, z_k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, layout="bshd")
    assert torch.equal(y_q, z_q.transpose(1, 2)) and torch.equal(y_k, z_k.transpose(1, 2))
    assert y_q.stride() == q.stride() and z_q.is_contiguous()
    w_q, w_k = rope(q[1].transpose(0, 1), k[1].transpose(0, 1), cos, sin, layout="thd")
    assert torch.equal(w_q, z_q[1]) and torch.equal(w_k, z_k[1]) and w_q.is_contiguous()


def test_angles_of_any_dtype_and_stride(device) -> None:
    q, k = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = angles(torch.arange(6, device=device).expand(2, -1), 16, torch.float32)
    y = rope(q, k, cos, sin)[0]
    assert torch.equal(rope(q, k, cos.mT.contiguous().mT, sin.double())[0], y)
    assert torch.equal(rope(q, k, cos[0], sin[0])[0], y)
    assert torch.equal(rope(q, k, cos[:1], sin[:1])[0], y)


def test_without_keys(device) -> None:
    q, _ = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = angles(torch.arange(6, device=device), 16, torch.float32)
    y, nothing = rope(q, q[:, :0], cos, sin)
    assert torch.equal(y, rope(q, q, cos, sin)[1]) and nothing.shape == (2, 0, 6, 16)


def test_backward_of_one_result_alone(device) -> None:
    q, k = (x.requires_grad_() for x in tensors((1, 2, 5, 8), 2, torch.float32, device))
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    rope(q, k, cos, sin)[0].square().sum().backward()
    torch.testing.assert_close(q.grad, 2 * q.detach())
    assert k.grad.count_nonzero() == 0


def test_the_same_tensor_twice(device) -> None:
    x = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    y, z = rope(x, x, cos, sin)
    (y.square().sum() + z.square().sum()).backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)], ids=str)
def test_no_elements(shape, device, poisoned) -> None:
    q = torch.randn(shape, device=device, requires_grad=True)
    cos, sin = angles(torch.arange(shape[2], device=device), 8, torch.float32)
    y, _ = rope(q, q.detach(), cos, sin)
    y.sum().backward()
    assert y.shape == q.grad.shape == shape


def test_fp64_is_differentiated_exactly_and_twice(device) -> None:
    inputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    cos, sin = angles(torch.arange(3, device=device), 4, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), inputs)
    assert torch.autograd.gradgradcheck(lambda q, k: rope(q, k, cos, sin), inputs)


def test_function_transforms(device) -> None:
    q, k = tensors((2, 3, 5, 12), 1, torch.float32, device)
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)

    def loss(q: Tensor, interleaved: bool) -> Tensor:
        return rope(q, k, cos, sin, interleaved=interleaved)[0].square().sum()

    for interleaved in (False, True):
        gradient = torch.func.grad(loss)(q, interleaved)
        leaf = q.clone().requires_grad_()
        loss(leaf, interleaved).backward()
        torch.testing.assert_close(gradient, leaf.grad)
    mapped = torch.func.vmap(lambda q, k: rope(q, k, cos, sin, layout="thd")[0], in_dims=(0, None))(
        q.transpose(1, 2), k[0].transpose(0, 1)
    )
    torch.testing.assert_close(mapped, rope(q, k, cos, sin)[0].transpose(1, 2))


def test_checkpointed_equals_stored(device, gradients) -> None:
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    inputs = tensors((1, 2, 5, 8), 1, torch.float32, device)

    def again(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.utils.checkpoint.checkpoint(lambda q, k: rope(q * 2, k, cos, sin), q, k, use_reentrant=False)

    once, twice = (gradients(f, inputs) for f in (lambda q, k: rope(q * 2, k, cos, sin), again))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_autocast_keeps_the_dtype(device) -> None:
    q, k = tensors((1, 2, 5, 8), 1, torch.float32, device)
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        y, _ = rope(q, k, cos, sin)
    assert torch.equal(y, rope(q, k, cos, sin)[0])


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is compiled is the same")
def test_compiled_equals_eager(device, gradients) -> None:
    """Once for lengths that vary."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.cos(), k.sin()

    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=frames, dynamic=True)
    counts = []
    for n_s in (7, 12):
        cos, sin = angles(torch.arange(n_s, device=device), 8, torch.float32)
        inputs = [torch.randn(2, n_s, heads, 8, device=device) for heads in (4, 2)]
        eager, traced = (gradients(functools.partial(f, cos=cos, sin=sin), inputs) for f in (function, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
        counts.append(frames.frame_count)
    assert counts[0] == counts[-1]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="what is registered is the same")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    q, k = (x.requires_grad_() for x in tensors((2, 4, 3, 8), 2, torch.float32, device))
    cos, sin = per_pair(torch.arange(3, device=device)[None, None], 4, torch.float32)
    given = CosSin(cos, sin, None, 8, False, 0, 0, 0, False)
    torch.library.opcheck(torch.ops.strata.rope.default, (q, k, False, *given))


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
def test_one_kernel_serves_every_shape_of_a_model() -> None:
    def step(batch: int, n_s: int, inverse: bool = False) -> None:
        q, k = (torch.empty(batch, n_s, n, 64, device="meta", requires_grad=True).transpose(1, 2) for n in (12, 2))
        y = rope(q, k, *torch.empty(2, batch, n_s, 64, device="meta"))
        torch.autograd.backward(y, [torch.empty_like(x).contiguous() for x in y])

    plans = [record(lambda s=s: step(*s)) for s in ((2, 64), (1, 61), (3, 2000))]
    assert len(plans[0]) == 2
    assert len(sum(plans[1:], plans[0])) == 2


def test_more_than_32_bits_index_is_refused() -> None:
    assert count_tiles(2**24, 8, 128) == 2**20
    with pytest.raises(ValueError, match="too many for a 32-bit index"):
        count_tiles(2**28, 8, 128)


Q, K, ANGLE = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 3, 8), torch.ones(3, 8)
COMPLEX = torch.ones(3, 4, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((Q[0], K, ANGLE, ANGLE), {}, r"must be \[B, H, S, D\] \(bhsd\)"),
        ((Q, K, ANGLE, ANGLE), {"layout": "thd"}, r"must be \[T, H, D\] \(thd\)"),
        ((Q, K, ANGLE, ANGLE), {"layout": "sbhd"}, "one of bhsd, bshd, thd, got 'sbhd'"),
        ((Q, K[..., :4], ANGLE, ANGLE), {}, "differ only in the number of heads"),
        ((Q, K.half(), ANGLE, ANGLE), {}, "float32 .* float16"),
        ((Q[..., :7], K[..., :7], ANGLE, ANGLE), {}, "even number of features"),
        ((Q, K, ANGLE[:2], ANGLE[:2]), {}, r"\[3, R\] or \[2, 3, R\]"),
        ((Q, K, ANGLE, ANGLE[:, :4]), {}, "the same shape"),
        ((Q, K, ANGLE.expand(3, 3, 8), ANGLE.expand(3, 3, 8)), {}, r"got float32 \[3, 3, 8\]"),
        ((Q, K, ANGLE[:, :5], ANGLE[:, :5]), {}, "even and from 2 to 8, got 5"),
        ((Q, K, torch.ones(3, 10), torch.ones(3, 10)), {}, "even and from 2 to 8, got 10"),
        ((Q, K, ANGLE, ANGLE), {"rotary_dim": 4}, "cos and sin must be 2 wide, or 4"),
        ((Q, K, COMPLEX), {"rotary_dim": 4}, "cos and sin must be 2 wide"),
        ((Q, K, ANGLE), {}, "a complex tensor as cos"),
        ((Q, K, COMPLEX, ANGLE), {}, "a complex tensor as cos"),
        ((Q, K, ANGLE, ANGLE.to("meta")), {}, "sin is on meta and q on cpu"),
        ((Q, K.to("meta"), ANGLE, ANGLE), {}, "q is on cpu and k on meta"),
        ((Q, K, ANGLE.clone().requires_grad_(), ANGLE), {}, "detach"),
        ((Q, K, ANGLE, ANGLE), {"positions": torch.ones(3)}, r"int32 or int64 \[3\] or \[2, 3\], got float32"),
        ((Q, K, ANGLE, ANGLE), {"positions": torch.ones(3, 3, dtype=torch.int64)}, r"got int64 \[3, 3\]"),
        ((Q, K, ANGLE[None], ANGLE[None]), {"positions": torch.ones(3, dtype=torch.int64)}, r"a table \[rows, R\]"),
        ((Q, K, ANGLE, ANGLE), {"mrope_section": [1, 1, 1]}, r"with the sum 4, got \[1, 1, 1\]"),
        ((Q, K, ANGLE, ANGLE), {"mrope_section": [2, 1, 1]}, r"\[3, 3, R\] or \[3, 2, 3, R\], got float32 \[3, 8\]"),
        ((Q, K, ANGLE, ANGLE), {"mrope_interleaved": True}, "mrope_section"),
    ],
)
def test_wrong_arguments(args, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        rope(*args, **kwargs)
