"""rms_norm against PyTorch in the same dtype and in fp64."""

import functools
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata_kernels import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Rows of one tile and of several, for one program and for more, and widths that are and are not powers of two.
SHAPES = [(2,), (3, 7), (1100, 16), (5, 127), (2, 3, 256), (2, 2, 2304), (9, 4096)]


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few programs that each walks over several tiles of a small input, on a GPU too."""
    monkeypatch.setattr(sys.modules["strata_kernels.ops.rms_norm"], "multiprocessors", lambda device: 1)


def plain(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    """Each cast mode as models write it."""
    if cast == "none":
        y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
        return y if weight is None else y * (offset + weight)
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast == "gemma":
        return (y if weight is None else y * (offset + weight.to(y.dtype))).to(x.dtype)
    return y.to(x.dtype) if weight is None else (offset + weight) * y.to(x.dtype)


def functions(eps: float = 1e-6, offset: float = 0.0, cast: str = "llama"):
    """Ours, PyTorch's in the same dtype and the formula without rounding, as functions of x and perhaps the weight."""
    return {
        "ours": lambda x, w=None: rms_norm(x, w, eps, offset=offset, cast=cast),
        "torchs": lambda x, w=None: plain(x, w, eps, offset, cast),
        "exact": lambda x, w=None: plain(x, w, eps, offset, "gemma"),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    x, weight = (torch.randn(size, device=device).to(dtype) for size in (shape, shape[-1:]))
    compare(inputs=[x, weight], **functions())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_wider_than_registers(dtype, device, compare, poisoned) -> None:
    x, weight = (torch.randn(size, device=device).to(dtype) for size in ((5, 17000), 17000))
    compare(inputs=[x, weight], **functions())


def test_one_feature_is_its_sign(device) -> None:
    x = torch.tensor([[3.0], [-1e-3]], device=device, requires_grad=True)
    y = rms_norm(x, eps=1e-12)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), x.sign())
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", ["llama", "gemma", "none"])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0], ids=["no weight", "offset 0", "offset 1"])
def test_cast_modes(offset, cast, dtype, device, compare, poisoned) -> None:
    x, weight = (torch.randn(size, device=device).to(dtype) for size in ((6, 100), 100))
    compare(inputs=[x] if offset is None else [x, 0.2 * weight], **functions(1e-5, offset or 0.0, cast))


@pytest.mark.parametrize("scale", [1e-6, 1e4, 1e15])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype, scale, device, compare) -> None:
    x = torch.randn(4, 96, device=device) * min(scale, torch.finfo(dtype).max / 8)
    x[0] = 0
    compare(inputs=[x.to(dtype), torch.randn(96, device=device).to(dtype)], **functions())


@pytest.mark.parametrize("cast", ["llama", "gemma"])
def test_a_wider_weight_is_promoted_as_by_pytorch(cast, device, compare) -> None:
    x, weight = torch.randn(5, 64, device=device).half(), torch.randn(64, device=device)
    y = compare(inputs=[x, weight], **functions(cast=cast))[0]
    assert y.dtype == (torch.float32 if cast == "llama" else torch.float16)


STRIDED = {
    "every other feature": lambda x: x[..., ::2],
    "columns of a wider projection": lambda x: x[..., 8:40],
    "transposed": lambda x: x.transpose(0, 1),
    "unaligned": lambda x: x[..., 1:],
    "broadcast": lambda x: x[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_inputs(view, device, compare, poisoned) -> None:
    x = view(torch.randn(4, 6, 64, device=device))
    compare(inputs=[x, torch.randn(x.shape[-1], device=device)], **functions())


def test_a_strided_weight(device, compare) -> None:
    compare(inputs=[torch.randn(5, 16, device=device), torch.randn(32, device=device)[::2]], **functions())


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_strided_gradients(view, device) -> None:
    dy = view(torch.randn(4, 6, 64, device=device))
    x, weight = torch.randn(dy.shape, device=device, requires_grad=True), torch.ones(dy.shape[-1], device=device)
    given, copied = (torch.autograd.grad(rms_norm(x, weight), x, d)[0] for d in (dy, dy.contiguous()))
    assert torch.equal(given, copied)


def test_rows_far_apart(far, device, gradients) -> None:
    x, weight = far(3, 48), torch.randn(48, device=device).bfloat16()
    given, dense = (gradients(rms_norm, [y, weight]) for y in (x, x.clone()))
    assert all(torch.equal(a, b) for a, b in zip(given, dense, strict=True))
    dy = far(3, 48)
    y = rms_norm(leaf := dy.clone().requires_grad_(), weight)
    given, dense = (torch.autograd.grad(y, leaf, d, retain_graph=True)[0] for d in (dy, dy.clone()))
    assert torch.equal(given, dense)


def test_no_rows(device, poisoned) -> None:
    x = torch.randn(2, 0, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_frozen_weight_gets_no_gradient(device, poisoned) -> None:
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(16, device=device)
    rms_norm(x, weight).sum().backward()
    trained = weight.clone().requires_grad_()
    again = x.detach().clone().requires_grad_()
    rms_norm(again, trained).sum().backward()
    assert weight.grad is None
    assert torch.equal(x.grad, again.grad)


def test_repeats_bit_for_bit(device, gradients) -> None:
    inputs = [torch.randn(67, 48, device=device), torch.randn(48, device=device)]
    first, second = (gradients(rms_norm, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_is_functional_rms_norm_under_gemma(device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.randn(40, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, cast="gemma"), torch_rms_norm(x, (40,), weight, 1e-5))


def test_fp64_is_differentiated_exactly(device) -> None:
    x = torch.randn(3, 9, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, offset=1.0, cast="gemma"), (x, weight))


def test_compiled_equals_eager(device, gradients) -> None:
    x, weight = torch.randn(4, 33, 48, device=device), torch.randn(48, device=device)

    def function(x, w):
        return rms_norm(x.transpose(0, 1) * 2, w).cos().transpose(0, 1)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, traced = (gradients(f, [x, weight]) for f in (function, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def test_selective_checkpointing_sees_the_operator(device, gradients) -> None:
    operator, forwards = torch.ops.strata.rms_norm.default, []

    def policy(context, op, *args, **kwargs):
        forwards.extend([context.is_recompute] * (op == operator))
        return CheckpointPolicy.MUST_SAVE if op == operator else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, w):
        return rms_norm(x.sin(), w).cos()

    def checkpointed(x, w):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(function, x, w, use_reentrant=False, context_fn=contexts)

    inputs = [torch.randn(6, 16, device=device), torch.randn(16, device=device)]
    plain, saved = (gradients(f, inputs) for f in (function, checkpointed))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))
    assert False in forwards


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own copies
def test_is_a_well_formed_operator(device) -> None:
    x = torch.randn(4, 6, 20, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(20, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.strata.rms_norm.default, (x, weight, 1e-6, 0.0, "llama"))
    y, rstd = (y.detach() for y in torch.ops.strata.rms_norm(x, weight, 1e-6, 0.0, "gemma"))
    args = (torch.randn_like(y), x.detach(), weight.detach(), rstd, 0.0, "gemma", True)
    torch.library.opcheck(torch.ops.strata.rms_norm_bwd.default, args)


def test_second_derivatives_are_refused(device) -> None:
    x = torch.randn(2, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X.long(),), {}, r"x must be .* got int64 \[2, 4\]"),
        ((torch.tensor(1.0),), {}, r"shape \[\.\.\., D\]"),
        ((X, torch.ones(5)), {}, r"shape \[4\], got float32 \[5\]"),
        ((X, torch.ones(4, dtype=torch.int32)), {}, "weight must be bf16, fp16, fp32, fp64"),
        ((X, torch.ones(4, device="meta")), {}, "weight is on meta and x on cpu"),
        ((X,), {"cast": "lama"}, "one of llama, gemma, none, got 'lama'"),
    ],
)
def test_wrong_arguments(args, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(*args, **kwargs)
