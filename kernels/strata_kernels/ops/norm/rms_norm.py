"""Root-mean-square normalization over the last axis: of x, or of x + residual.

    h    = x + residual, rounded to their dtype; h = x without a residual
    rstd = 1 / sqrt(mean(h²) + eps)         ĥ = h · rstd         y = ĥ · (offset + w)
    g    = dy · (offset + w)
    dx   = rstd · (g - ĥ · mean(g · ĥ)) + dh = dresidual          dw = Σ_rows dy · ĥ

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).

Minimum bytes moved per element: rms_norm 2·itemsize forward and 3·itemsize backward, add_rms_norm 4·itemsize in each
direction.
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
    """dx and dw. For add_rms_norm, x is its output h, and dh the incoming gradient of h; dh is None for rms_norm."""

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
    """y, and the statistics that backward needs: rstd of each row."""

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
        # Otherwise autograd launches a kernel that fills a zero tensor as the gradient of the statistics.
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
    """y, h and rstd of each row. If only one output has an incoming gradient, no zeros are allocated for the other."""

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
    """Returns the norm of x, and x itself, from one autograd node, whose backward kernel adds both gradients of x."""

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
    """Raise ValueError for a wrong shape, dtype, device or `cast`."""
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
    """`(offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)` in one kernel.

    The mean is computed in fp32. Under `torch.func` transforms, the operator runs in plain PyTorch. `cast` selects when
    values are rounded to the dtype of x, which differs between models:

    - "llama": after the normalization, before the weight (Llama, Qwen, Mistral).
    - "gemma": once, at the end; with the default offset of 0 this is `torch.nn.functional.rms_norm`.
    - "none": after each operation (rstd, normalization, product), as in eager PyTorch without casts.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides. fp64 runs in plain PyTorch on every device.
        weight: [D], any of these dtypes, or None.
        eps: added to the mean square.
        offset: added to the weight, in fp32.
        cast: see above.

    Returns:
        [..., D], contiguous; the dtype of x. With "llama" and "none", `torch.promote_types(x.dtype, weight.dtype)`.

    Raises:
        ValueError: x is 0-d or has an unsupported dtype; weight has the wrong shape, dtype or device; unknown `cast`.

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
    """`rms_norm(x, ...), x`, with the second result for the residual connection; arguments as in `rms_norm`.

    One backward kernel adds the gradients of both results. This is an autograd.Function, not a registered operator: it
    does not support `torch.compile`, dispatch modes or `torch.func`.
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
    """`h = x + residual; y = rms_norm(h, weight, eps, offset=offset, cast=cast)` in one kernel; returns y, h.

    h is rounded to the dtype of x, and y is computed from the rounded h. Under `torch.func` transforms, the operator
    runs in plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides. fp64 runs in plain PyTorch on every device.
        residual: [..., D], same shape, dtype and device as x.
        weight: [D], or None for no weight.
        eps, offset, cast: as in `rms_norm`.

    Returns:
        y: [..., D], contiguous, in the dtype that `rms_norm` returns. h: [..., D], contiguous, in the dtype of x.

    Raises:
        ValueError: x and residual differ in shape, dtype or device; otherwise as in `rms_norm`.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), eps=0.0)
        (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    _check(x, weight, cast)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        shapes = f"{describe(x)} and {describe(residual)}"
        raise ValueError(f"x and residual must have the same shape and dtype, got {shapes}")
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device} and x on {x.device}: move one of them")
    if is_transformed():
        return norm_reference(x, residual, weight, None, eps, offset, cast, center=False)[:2]
    y, h, _ = _AddRMSNorm.apply(x, residual, weight, eps, offset, cast)
    return y, h
