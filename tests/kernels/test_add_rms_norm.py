"""add_rms_norm against PyTorch in the same dtype and in fp64; what it shares with other norms is in test_norm.py."""

import pytest
import torch
from torch import Tensor

from strata_kernels import add_rms_norm, rms_norm
from strata_kernels.ops._launch import recording
from strata_kernels.ops.norm.rms_norm import rms_norm_and_input

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
on_gpu = pytest.mark.parametrize("path", ["gpu"] * torch.cuda.is_available(), indirect=True)


def plain(x: Tensor, residual: Tensor, weight: Tensor | None = None, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """As models of the Llama kind write it."""
    h = x + residual
    wide = h if h.dtype == torch.float64 else h.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
    return y if weight is None else y * (offset + weight), h


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in (shape, shape, shape[-1:])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 128)], ids=str)
def test_matches_fp64(shape, dtype, device, compare, poisoned) -> None:
    given = inputs(shape, dtype, device)
    _, h, *_ = compare(add_rms_norm, plain, given)
    assert torch.equal(h, given[0] + given[1]) or device.type == "cpu"


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(65537, 16), (1031, 2880), (517, 4096), (301, 16384), (150, 40000)], ids=str)
def test_matches_fp64_on_a_gpu(shape, dtype, device, compare, poisoned) -> None:
    compare(add_rms_norm, plain, inputs(shape, dtype, device))


@pytest.mark.parametrize("offset", [None, 1.0], ids=["no weight", "offset 1"])
def test_weights(offset, device, compare) -> None:
    given = inputs((5, 48), torch.float32, device)
    if offset is None:
        compare(add_rms_norm, plain, given[:2])
    else:
        compare(lambda *t: add_rms_norm(*t, offset=offset), lambda *t: plain(*t, offset), given)


@pytest.mark.parametrize("cast", ["llama", "gemma", "none"])
def test_normalizes_as_rms_norm_does(cast, device) -> None:
    x, residual, weight = inputs((5, 48), torch.bfloat16, device)
    y, h = add_rms_norm(x, residual, weight, 1e-5, offset=0.5, cast=cast)
    assert torch.equal(y, rms_norm(h, weight, 1e-5, offset=0.5, cast=cast))


@pytest.mark.parametrize("used", [0, 1], ids=["y", "h"])
def test_one_output_used(used, device, compare, poisoned) -> None:
    given = inputs((5, 48), torch.float32, device)
    if used == 0:
        compare(lambda *t: add_rms_norm(*t)[0], lambda *t: plain(*t)[0], given)
    else:
        x, residual, weight = (t.requires_grad_() for t in given)
        dh = torch.randn_like(x)
        gradients = torch.autograd.grad(add_rms_norm(x, residual, weight)[1], given, dh, allow_unused=True)
        assert torch.equal(gradients[0], dh) and torch.equal(gradients[1], dh) and gradients[2] is None


@pytest.mark.parametrize("used", ["y", "x", "both"])
def test_a_norm_beside_its_input_adds_both_gradients(used, device, compare, poisoned) -> None:
    def chosen(y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return {"y": (y,), "x": (x * 1,), "both": (y, x * 1)}[used]

    x, _, weight = inputs((5, 48), torch.float32, device)
    if used == "x":
        given = [x.requires_grad_(), weight.requires_grad_()]
        dx, dw = torch.autograd.grad(rms_norm_and_input(*given)[1], given, torch.ones_like(x), allow_unused=True)
        assert torch.equal(dx, torch.ones_like(x)) and dw is None
        return
    compare(
        lambda x, w: chosen(*rms_norm_and_input(x, w, offset=1.0)),
        lambda x, w: chosen(plain(x, torch.zeros_like(x), w, 1.0)[0], x),
        [x, weight],
    )


@pytest.mark.parametrize("used", ["y", "h", "both"])
def test_no_zeros_are_made_for_an_unused_output(used) -> None:
    x, residual = (torch.empty(4, 64, device="meta", requires_grad=True) for _ in range(2))
    with recording() as calls:
        y, h = add_rms_norm(x, residual)
        {"y": y.sum(), "h": h.sum(), "both": y.sum() + h.sum()}[used].backward()
    backward = [call.args[1] is not None for call in calls if call.kernel.__name__ == "norm_bwd_kernel"]
    assert backward == {"y": [False], "h": [], "both": [True]}[used]


def test_fp64_is_differentiated_exactly(device) -> None:
    given = [t.double().requires_grad_() for t in inputs((3, 9), torch.float32, device)]
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, offset=1.0, cast="gemma"), given)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, torch.ones(2, 5)), r"the same shape and dtype, got float32 \[2, 4\] and float32 \[2, 5\]"),
        ((X, X.half()), r"got float32 \[2, 4\] and float16 \[2, 4\]"),
        ((X, X.to("meta")), "residual is on meta and x on cpu"),
        ((X.int(), X.int()), r"x must be bf16, fp16, fp32, fp64 of shape \[\.\.\., D\]"),
        ((X, X, torch.ones(5)), r"weight must be .* of shape \[4\], got float32 \[5\]"),
    ],
)
def test_wrong_arguments(args, message) -> None:
    with pytest.raises(ValueError, match=message):
        add_rms_norm(*args)
