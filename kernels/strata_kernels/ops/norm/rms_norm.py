"""Root-mean-square normalization over the last axis.

    rstd = 1 / sqrt(mean(x²) + eps)         x̂ = x · rstd         y = x̂ · (offset + w)
    g    = dy · (offset + w)
    dx   = rstd · (g - x̂ · mean(g · x̂))                          dw = Σ_rows dy · x̂

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).

The kernels are those of `host`. Bytes moved per element at the least: forward 2·itemsize, backward 3·itemsize.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype
from .._operator import Operator, is_transformed, operator, plain_gradients
from .host import (
    gradient_like,
    norm_backward,
    norm_forward,
    norm_reference,
    normalized_like,
    statistics_like,
    unfilled,
)

Cast = Literal["llama", "gemma", "none"]


@operator(
    "rms_norm_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor stats, float offset, bool weight_grad)"
    " -> (Tensor, Tensor)"
)
class _RMSNormBackward(Operator):
    """dx and dw; `dh` is the gradient of h where x is the h of add_rms_norm."""

    @staticmethod
    def forward(
        dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float, weight_grad: bool
    ) -> tuple[Tensor, Tensor]:
        dw = gradient_like(weight, weight_grad, x)
        dx = norm_backward(dy, dh, x, weight, stats, offset, False, dw if weight_grad else None, None)
        return dx, dw

    @staticmethod
    def fake(
        dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, offset: float, weight_grad: bool
    ) -> tuple[Tensor, Tensor]:
        return unfilled(x), gradient_like(weight, weight_grad, x)


@operator("rms_norm(Tensor x, Tensor? weight, float eps, float offset, str cast) -> (Tensor, Tensor)")
class _RMSNorm(Operator):
    """y and the statistics that the backward pass needs."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
        y, _, stats = norm_forward(x, None, weight, None, eps, offset, cast, center=False)
        return y, stats

    @staticmethod
    def fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> tuple[Tensor, Tensor]:
        return normalized_like(x, weight, cast), statistics_like(x, center=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, *ctx.settings = inputs
        stats = output[1]
        ctx.mark_non_differentiable(stats)
        # Otherwise the gradient of the statistics arrives as a tensor of zeros, at the price of a kernel.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, stats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, weight, stats = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *rms_norm_gradients(dy, x, weight, *ctx.settings), None, None, None
        weight_grad = ctx.needs_input_grad[1]
        _, offset, _ = ctx.settings
        dx, dw = _RMSNormBackward.apply(dy, None, x, weight, stats, offset, weight_grad)
        return dx, dw if weight_grad else None, None, None, None


def _plain(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    return norm_reference(x, None, weight, None, eps, offset, cast, center=False)[0]


def rms_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Any, ...]:
    """dx and dw in plain PyTorch, differentiable."""
    return plain_gradients(partial(_plain, eps=eps, offset=offset, cast=cast), (x, weight), dy)


def check(x: Tensor, weight: Tensor | None, cast: str) -> None:
    """Raise the `ValueError` of `rms_norm`."""
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D] with D > 0, got {describe(x)}")
    if weight is not None:
        if weight.shape != x.shape[-1:] or not has_dtype(weight):
            raise ValueError(f"weight must be {DTYPES} of shape [{x.shape[-1]}], got {describe(weight)}")
        if weight.device != x.device:
            raise ValueError(f"weight is on {weight.device} and x on {x.device}: move one of them")
    if cast not in get_args(Cast):
        raise ValueError(f"cast must be one of {', '.join(get_args(Cast))}, got {cast!r}")


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> Tensor:
    """`(offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)`, fused.

    The mean is taken in fp32. Under `torch.func` all is plain PyTorch. `cast` says where values are rounded to the
    dtype of x, as models differ in it:

    - "llama": after the normalization, before the weight (Llama, Qwen, Mistral).
    - "gemma": once, at the end; with the default offset of 0 this is `torch.nn.functional.rms_norm`.
    - "none": rstd, the normalization and the product, as arithmetic without any cast rounds.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides. fp64 runs in plain PyTorch on every device.
        weight: [D], or None for no weight. Another dtype than that of x is promoted as PyTorch does.
        eps: added to the mean square.
        offset: added to the weight, in fp32.
        cast: see above.

    Returns:
        [..., D], contiguous; the dtype of x, or the promoted one ("llama" and "none" with a wider weight).

    Raises:
        ValueError: x has no axis, a weight of another shape or device, another dtype, or an unknown cast.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
        tensor([0.8485, 1.1314])
    """
    check(x, weight, cast)
    if is_transformed():
        return _plain(x, weight, eps, offset, cast)
    y: Tensor = _RMSNorm.apply(x, weight, eps, offset, cast)[0]
    return y
