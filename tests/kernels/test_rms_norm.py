"""rms_norm against PyTorch in the same dtype and in fp64; what it shares with other norms is in test_norm.py."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from strata_kernels import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Rows of one tile and of several, and widths that are and are not powers of two.
SHAPES = [(2,), (3, 7), (150, 16), (5, 127), (2, 3, 256), (2, 1030)]
# As many rows as a GPU's programs share, every width between two powers of two at which rows are cut otherwise, and
# rows that do not stay in registers.
WIDE = [(65537, 16), (4099, 1000), (1031, 2560), (517, 2880), (519, 3584), (517, 5120), (300, 6145), (299, 11008)]
WIDE += [(301, 16384), (157, 18944), (5, 32769), (150, 65536)]
on_gpu = pytest.mark.parametrize("path", ["gpu"] * torch.cuda.is_available(), indirect=True)


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


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_matches_fp64_on_a_gpu(shape, dtype, device, compare, poisoned) -> None:
    x, weight = (torch.randn(size, device=device).to(dtype) for size in (shape, shape[-1:]))
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


def test_is_functional_rms_norm_under_gemma(device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.randn(40, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, cast="gemma"), torch_rms_norm(x, (40,), weight, 1e-5))


def test_fp64_is_differentiated_exactly(device) -> None:
    x = torch.randn(3, 9, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, offset=1.0, cast="gemma"), (x, weight))


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
