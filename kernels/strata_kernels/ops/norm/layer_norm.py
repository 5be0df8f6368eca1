"""Layer normalization over the last axis.

    mean = Σ x / D        rstd = 1 / sqrt(mean((x - mean)²) + eps)        x̂ = (x - mean) · rstd        y = x̂ · w + b
    g    = dy · w
    dx   = rstd · (g - mean(g) - x̂ · mean(g · x̂))        dw = Σ_rows dy · x̂        db = Σ_rows dy

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).

Minimum bytes moved per element: forward 2·itemsize, backward 3·itemsize.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._launch import DTYPES, describe, has_dtype
from .._operator import Operator, is_transformed, operator, plain_gradients
from .norm_launch import norm_backward, norm_forward
from .norm_reference import gradient_like, norm_reference, normalized_like, statistics_like, unfilled

# Rounding as in "gemma": once, at the end, to the dtype of x.
_CAST = "gemma"


@operator(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, bool weight_grad, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor)"
)
class _LayerNormBackward(Operator):
    """dx, dw and db."""

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
        weight_grad: bool, bias_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dw, db = gradient_like(weight, weight_grad, x), gradient_like(bias, bias_grad, x)
        wanted = dw if weight_grad else None, db if bias_grad else None
        return norm_backward(dy, None, x, weight, stats, 0.0, True, *wanted), dw, db

    @staticmethod
    def fake(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
        weight_grad: bool, bias_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return unfilled(x), gradient_like(weight, weight_grad, x), gradient_like(bias, bias_grad, x)


@operator("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)")
class _LayerNorm(Operator):
    """y, and the statistics that backward needs: mean and rstd of each row."""

    recomputed = 1

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        y, _, stats = norm_forward(x, None, weight, bias, eps, 0.0, _CAST, center=True)
        return y, stats

    @staticmethod
    def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        return normalized_like(x, weight, _CAST), statistics_like(x, center=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, ctx.eps = inputs
        stats = output[1]
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, stats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            *inputs, _ = ctx.saved_tensors
            return *plain_gradients(partial(_plain, eps=ctx.eps), inputs, dy), None
        _, weight_grad, bias_grad, _ = ctx.needs_input_grad
        dx, dw, db = _LayerNormBackward.apply(dy, *ctx.saved_tensors, weight_grad, bias_grad)
        return dx, dw if weight_grad else None, db if bias_grad else None, None


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return norm_reference(x, None, weight, bias, eps, 0.0, _CAST, center=True)[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)`, in one kernel, in fp32, rounded once.

    Autocast has no effect: arithmetic is always fp32, and the result has the dtype of x. Under `torch.func` transforms,
    the operator runs in plain PyTorch.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides. fp64 runs in plain PyTorch on every device.
        weight: [D], any of these dtypes, or None.
        bias: [D], any of these dtypes, or None.
        eps: added to the variance.

    Returns:
        [..., D], contiguous, in the dtype of x.

    Raises:
        ValueError: x is 0-d or has an unsupported dtype; weight or bias has the wrong shape, dtype or device.

    Example:
        >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
        tensor([-1.,  1.])
    """
    if not has_dtype(x) or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D] with D > 0, got {describe(x)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is None:
            continue
        if given.shape != x.shape[-1:] or not has_dtype(given):
            raise ValueError(f"{name} must be {DTYPES} of shape [{x.shape[-1]}], got {describe(given)}")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device} and x on {x.device}: move one of them")
    if is_transformed():
        return _plain(x, weight, bias, eps)
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)[0]
    return y
