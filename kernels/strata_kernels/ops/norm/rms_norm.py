"""Root-mean-square normalization over the last axis, alone or of a sum with a residual connection.

    h    = x + residual, rounded to their dtype; without a residual h is x
    rstd = 1 / sqrt(mean(h²) + eps)         ĥ = h · rstd         y = ĥ · (offset + w)
    g    = dy · (offset + w)
    dx   = rstd · (g - ĥ · mean(g · ĥ)) + dh = dresidual          dw = Σ_rows dy · ĥ

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).

Bytes moved per element at the least: rms_norm 2·itemsize forward and 3·itemsize backward, add_rms_norm 4·itemsize each
way.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype
from .._operator import Operator, is_transformed, operator, plain_gradients, refuse_double_backward
from .norm_launch import norm_backward, norm_forward
from .norm_reference import gradient_like, norm_reference, normalized_like, statistics_like, unfilled

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

    recomputed = 1

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
            return *_differentiable_gradients(dy, x, weight, *ctx.settings), None, None, None
        weight_grad = ctx.needs_input_grad[1]
        _, offset, _ = ctx.settings
        dx, dw = _RMSNormBackward.apply(dy, None, x, weight, stats, offset, weight_grad)
        return dx, dw if weight_grad else None, None, None, None


@operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str cast)"
    " -> (Tensor, Tensor, Tensor)"
)
class _AddRMSNorm(Operator):
    """y, h and the statistics. If the gradient of only one output arrives, no zeros are made for the other."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm_forward(x, residual, weight, None, eps, offset, cast, center=False)

    @staticmethod
    def fake(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return normalized_like(x, weight, cast), unfilled(x), statistics_like(x, center=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, _, weight, *ctx.settings = inputs
        _, h, stats = output
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, weight, stats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dh, dh, None, None, None, None
        h, weight, stats = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, dw = _differentiable_gradients(dy, h, weight, *ctx.settings)
            dx = dx if dh is None else dx + dh
            return dx, dx, dw, None, None, None
        weight_grad = ctx.needs_input_grad[2]
        _, offset, _ = ctx.settings
        dx, dw = _RMSNormBackward.apply(dy, dh, h, weight, stats, offset, weight_grad)
        return dx, dx, dw if weight_grad else None, None, None, None


class _RMSNormAndInput(torch.autograd.Function):
    """One node for the norm of x and for x itself, whose backward kernel adds both gradients of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
    ) -> tuple[Tensor, Tensor]:
        y, stats = _RMSNorm.apply(x, weight, eps, offset, cast)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, stats)
        ctx.offset = offset
        return y, x

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("rms_norm_and_input")
        if dy is None:
            return dh, None, None, None, None
        x, weight, stats = ctx.saved_tensors
        weight_grad = ctx.needs_input_grad[1]
        dx, dw = _RMSNormBackward.apply(dy, dh, x, weight, stats, ctx.offset, weight_grad)
        return dx, dw if weight_grad else None, None, None, None


def _plain(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    return norm_reference(x, None, weight, None, eps, offset, cast, center=False)[0]


def _differentiable_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str
) -> tuple[Any, ...]:
    """dx and dw in plain PyTorch, differentiable."""
    return plain_gradients(partial(_plain, eps=eps, offset=offset, cast=cast), (x, weight), dy)


def _check(x: Tensor, weight: Tensor | None, cast: str) -> None:
    """Raise ValueError for arguments that do not fit."""
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

    The mean is computed in fp32. Under `torch.func` the operator is plain PyTorch. `cast` selects where values are
    rounded to the dtype of x, which differs between models:

    - "llama": after the normalization, before the weight (Llama, Qwen, Mistral).
    - "gemma": once, at the end; with the default offset of 0 this is `torch.nn.functional.rms_norm`.
    - "none": after each operation (rstd, the normalization, the product), as arithmetic without casts rounds.

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
    _check(x, weight, cast)
    if is_transformed():
        return _plain(x, weight, eps, offset, cast)
    y: Tensor = _RMSNorm.apply(x, weight, eps, offset, cast)[0]
    return y


def rms_norm_and_input(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast: Cast = "llama"
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x, and x for the residual connection around what follows.

    The kernel of the backward pass adds the gradients of both. Arguments are those of `rms_norm`. It is no operator:
    neither for compile, nor for dispatch modes or `torch.func`.
    """
    _check(x, weight, cast)
    y, x = _RMSNormAndInput.apply(x, weight, eps, offset, cast)
    return y, x


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: Cast = "llama",
) -> tuple[Tensor, Tensor]:
    """`h = x + residual; y = rms_norm(h, weight, eps, offset=offset, cast=cast)`, fused; returns y and h.

    h is rounded as PyTorch rounds the sum, and y is computed from the rounded h. Under `torch.func` the operator is
    plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides. fp64 runs in plain PyTorch on every device.
        residual: the same shape, dtype and device.
        weight: [D], or None for no weight.
        eps, offset, cast: as in `rms_norm`.

    Returns:
        y, [..., D], contiguous, in the dtype that `rms_norm` gives; h, [..., D], contiguous, in the dtype of x.

    Raises:
        ValueError: x and residual differ in shape, dtype or device, or what `rms_norm` raises.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), eps=0.0)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    _check(x, weight, cast)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        shapes = f"{describe(x)} and {describe(residual)}"
        raise ValueError(f"x and residual must have one shape and one dtype, got {shapes}")
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device} and x on {x.device}: move one of them")
    if is_transformed():
        return norm_reference(x, residual, weight, None, eps, offset, cast, center=False)[:2]
    y, h, _ = _AddRMSNorm.apply(x, residual, weight, eps, offset, cast)
    return y, h
