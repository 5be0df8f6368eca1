"""layer_norm against PyTorch in the same dtype and in fp64; what it shares with other norms is in test_norm.py."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata_kernels import layer_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
on_gpu = pytest.mark.parametrize("path", ["gpu"] * torch.cuda.is_available(), indirect=True)


def plain(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in (shape, shape[-1:], shape[-1:])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 7), (2, 3, 128)], ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    compare(layer_norm, plain, inputs(shape, dtype, device))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(65537, 16), (1031, 2880), (517, 4096), (301, 16384), (150, 40000)], ids=str)
def test_matches_fp64_on_a_gpu(shape, dtype, device, compare, poisoned) -> None:
    compare(layer_norm, plain, inputs(shape, dtype, device))


@pytest.mark.parametrize("names", [(), ("weight",), ("bias",)], ids=str)
def test_without_weight_or_bias(names, device, compare, poisoned) -> None:
    given = inputs((5, 48), torch.float32, device)

    def named(norm):
        return lambda x, *others: norm(x, **dict(zip(names, others, strict=True)))

    compare(named(layer_norm), named(plain), given[: 1 + len(names)])


@pytest.mark.parametrize(("mean", "scale"), [(1000.0, 1.0), (0.0, 1e-6), (0.0, 1e15)])
def test_extreme_values(mean, scale, device, compare) -> None:
    x, weight, bias = inputs((4, 96), torch.float32, device)
    x = mean + scale * x
    x[0] = mean
    compare(layer_norm, plain, [x, weight, bias])


def test_another_dtype_of_weight_keeps_that_of_x(device, within_bar) -> None:
    x, weight, bias = inputs((5, 64), torch.float32, device)
    y = layer_norm(x.half(), weight, bias)
    assert y.dtype == torch.float16
    within_bar(y, plain(x.half().float(), weight, bias).half(), plain(*(t.double() for t in (x.half(), weight, bias))))


def test_fp64_is_differentiated_exactly(device) -> None:
    given = [t.double().requires_grad_() for t in inputs((3, 9), torch.float32, device)]
    assert torch.autograd.gradcheck(layer_norm, given)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.long(),), r"x must be .* got int64 \[2, 4\]"),
        ((torch.tensor(1.0),), r"shape \[\.\.\., D\]"),
        ((X, torch.ones(5)), r"weight must be .* of shape \[4\], got float32 \[5\]"),
        ((X, None, torch.ones(2, 4)), r"bias must be .* of shape \[4\], got float32 \[2, 4\]"),
        ((X, None, torch.ones(4, device="meta")), "bias is on meta and x on cpu"),
    ],
)
def test_wrong_arguments(args, message) -> None:
    with pytest.raises(ValueError, match=message):
        layer_norm(*args)
