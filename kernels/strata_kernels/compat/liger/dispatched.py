"""`liger_kernel.functional`: the operators with Liger's arguments for implementations, of which Strata has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from ...ops.cross_entropy.reduction import Reduction
from .cross_entropies import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction, Losses
from .distributions import liger_softmax
from .divergences import LigerFusedLinearJSDFunction, LigerJSDFunction, LigerKLDivLossFunction
from .feed_forward import LigerGELUMulFunction, LigerSiLUMulFunction
from .norms import LigerFusedAddRMSNormFunction, LigerLayerNormFunction, LigerRMSNormFunction
from .rotations import LigerRopeFunction

_CHOICES = ("impl", "mode", "backend")


def _with_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with Liger's keywords that choose an implementation, which are ignored."""

    @wraps(function)
    def call(
        *args: Any, impl: str | None = None, mode: str | None = None, backend: str | None = None, **kwargs: Any
    ) -> Any:
        return function(*args, **kwargs)

    own = inspect.signature(function)
    choices = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _CHOICES]
    call.__signature__ = own.replace(parameters=[*own.parameters.values(), *choices])  # type: ignore[attr-defined]
    return call


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
) -> Tensor:
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Losses:
    return LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def _fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


rms_norm = _with_choice(_rms_norm)
layer_norm = _with_choice(_layer_norm)
cross_entropy = _with_choice(_cross_entropy)
fused_add_rms_norm = _with_choice(_fused_add_rms_norm)
fused_linear_cross_entropy = _with_choice(LigerFusedLinearCrossEntropyFunction.apply)
geglu = _with_choice(LigerGELUMulFunction.apply)
rope = _with_choice(LigerRopeFunction.apply)
softmax = _with_choice(liger_softmax)
swiglu = _with_choice(LigerSiLUMulFunction.apply)
jsd = _with_choice(LigerJSDFunction.apply)
kl_div = _with_choice(LigerKLDivLossFunction.apply)
fused_linear_jsd = _with_choice(LigerFusedLinearJSDFunction.apply)
