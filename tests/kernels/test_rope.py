"""rope against PyTorch in the same dtype and in fp64."""

import functools

import pytest
import torch
from torch import Tensor

from strata_kernels import rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor, heads before positions, as `transformers` writes it; cos and sin have an axis for the batch."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), dim=-1)


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (x.to(q.dtype) if x.dim() == 3 else x[None].to(q.dtype) for x in (cos, sin))
    return rotate(q, cos, sin), rotate(k, cos, sin)


def angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [*positions, width]; exact in fp64 only where the dtype is."""
    frequency = 100.0 ** -(torch.arange(width // 2, device=positions.device) / max(1, width // 2))
    angle = (positions[..., None] * frequency).repeat(*[1] * positions.dim(), 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_fp64(case, dtype, device, compare, poisoned) -> None:
    shape, heads_k, width, batched = case
    positions = torch.arange(shape[2], device=device)
    if batched:
        positions = (positions + 3 * torch.arange(shape[0], device=device)[:, None]) % 5
    cos, sin = angles(positions, width, dtype)
    bound = [functools.partial(function, cos=cos, sin=sin) for function in (rope, plain)]
    compare(*bound, tensors(shape, heads_k, dtype, device))


@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype, scale, device, compare) -> None:
    cos, sin = angles(torch.arange(6, device=device), 16, dtype)
    inputs = [(scale * x).to(dtype) for x in tensors((1, 2, 6, 16), 2, torch.float32, device)]
    compare(*(functools.partial(function, cos=cos, sin=sin) for function in (rope, plain)), inputs)


STRIDED = {
    "heads before positions": lambda q, k: (q.contiguous(), k.contiguous()),
    "one of each": lambda q, k: (q.contiguous(), k),
    "parts of one projection": lambda q, k: (
        torch.cat((q, k), 1).transpose(1, 2).contiguous().transpose(1, 2).split(4, 1)
    ),
    "every other feature": lambda q, k: (q[..., ::2], k[..., ::2]),
    "broadcast": lambda q, k: (q[:1].expand(2, -1, -1, -1), k),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, device, compare, poisoned) -> None:
    q, k = view(*tensors((2, 4, 9, 32), 4, torch.float32, device))
    if q.shape[-1] != k.shape[-1]:
        k = k[..., : q.shape[-1]]
    cos, sin = angles(torch.arange(9, device=device), q.shape[-1], torch.float32)
    compare(*(functools.partial(function, cos=cos, sin=sin) for function in (rope, plain)), [q, k])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)], ids=["batch", "heads", "positions"])
def test_rows_far_apart(order, far, gradients) -> None:
    x = far(3, 1, 2, 8).permute(order)
    y = torch.randn(x.shape, device=x.device).bfloat16()
    cos, sin = angles(torch.arange(x.shape[2], device=x.device), 8, torch.float32)
    for i in range(2):
        given, dense = (gradients(lambda q, k: rope(q, k, cos, sin), [z, y][:: 1 - 2 * i]) for z in (x, x.clone()))
        assert all(torch.equal(a, b) for a, b in zip(given, dense, strict=True))


def test_both_layouts_agree_and_keep_the_memory_layout(device) -> None:
    q, k = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = angles(torch.arange(6, device=device), 16, torch.float32)
    y_q, y_k = rope(q, k, cos, sin)
    z_q, z_k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, layout="bshd")
    assert torch.equal(y_q, z_q.transpose(1, 2)) and torch.equal(y_k, z_k.transpose(1, 2))
    assert y_q.stride() == q.stride() and z_q.is_contiguous()


def test_angles_of_any_dtype_and_stride(device) -> None:
    q, k = tensors((2, 4, 6, 16), 2, torch.float32, device)
    cos, sin = angles(torch.arange(6, device=device).expand(2, -1), 16, torch.float32)
    y = rope(q, k, cos, sin)[0]
    assert torch.equal(rope(q, k, cos.mT.contiguous().mT, sin.double())[0], y)
    assert torch.equal(rope(q, k, cos[0], sin[0])[0], y)
    assert torch.equal(rope(q, k, cos[:1], sin[:1])[0], y)


def test_backward_of_one_result_alone(device) -> None:
    q, k = (x.requires_grad_() for x in tensors((1, 2, 5, 8), 2, torch.float32, device))
    cos, sin = angles(torch.arange(5, device=device), 8, torch.float32)
    rope(q, k, cos, sin)[0].square().sum().backward()
    torch.testing.assert_close(q.grad, 2 * q.detach())
    assert k.grad.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)], ids=str)
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


def test_compiled_equals_eager(device, gradients) -> None:
    cos, sin = angles(torch.arange(7, device=device), 8, torch.float32)

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.cos(), k.sin()

    inputs = [torch.randn(2, 7, heads, 8, device=device) for heads in (4, 2)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, traced = (gradients(f, inputs) for f in (function, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    q, k = (x.requires_grad_() for x in tensors((2, 4, 3, 8), 2, torch.float32, device))
    cos, sin = angles(torch.arange(3, device=device)[None], 8, torch.float32)
    torch.library.opcheck(torch.ops.strata.rope.default, (q, k, cos, sin, False, True))


Q, K, ANGLE = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 3, 8), torch.ones(3, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((Q[0], K, ANGLE, ANGLE), {}, "four axes"),
        ((Q, K, ANGLE, ANGLE), {"layout": "sbhd"}, "one of bhsd, bshd, got 'sbhd'"),
        ((Q, K[..., :4], ANGLE, ANGLE), {}, "differ in their heads only"),
        ((Q, K.half(), ANGLE, ANGLE), {}, "float32 .* float16"),
        ((Q, K, ANGLE[:2], ANGLE[:2]), {}, r"\[3, R\] or \[2, 3, R\]"),
        ((Q, K, ANGLE, ANGLE[:, :4]), {}, "both be"),
        ((Q, K, ANGLE.expand(3, 3, 8), ANGLE.expand(3, 3, 8)), {}, r"got float32 \[3, 3, 8\]"),
        ((Q, K, ANGLE[:, :5], ANGLE[:, :5]), {}, "even and at most 8, got 5"),
        ((Q, K, torch.ones(3, 10), torch.ones(3, 10)), {}, "even and at most 8, got 10"),
        ((Q, K, ANGLE, ANGLE.to("meta")), {}, "one device, got cpu, cpu, cpu, meta"),
        ((Q, K, ANGLE.clone().requires_grad_(), ANGLE), {}, "detach"),
    ],
)
def test_wrong_arguments(args, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        rope(*args, **kwargs)
