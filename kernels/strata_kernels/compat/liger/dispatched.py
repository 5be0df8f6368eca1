"""`liger_kernel.functional`: the operators with Liger's choice of implementations, of which there is one here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from .cross_entropies import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction
from .distributions import LigerSoftmaxFunction
from .divergences import LigerFusedLinearJSDFunction, LigerJSDFunction, LigerKLDivLossFunction
from .feed_forward import LigerGELUMulFunction, LigerSiLUMulFunction
from .norms import LigerFusedAddRMSNormFunction, LigerLayerNormFunction, LigerRMSNormFunction
from .rotations import LigerRopeFunction


def _with_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the keywords by which Liger's callers choose an implementation, which change nothing."""

    @wraps(function)
    def call(
        *args: Any, impl: str | None = None, mode: str | None = None, backend: str | None = None, **kwargs: Any
    ) -> Any:
        return function(*args, **kwargs)

    return call


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, *args: Any, **kwargs: Any) -> Tensor:
    return LigerRMSNormFunction.apply(x, weight, eps, *args, **kwargs)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    return LigerCrossEntropyFunction.apply(input, target, *args, **kwargs)


def _fused_add_rms_norm(X: Tensor, R: Tensor, W: Tensor, eps: float = 1e-6, *args: Any, **kwargs: Any) -> Any:
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, *args, **kwargs)


rms_norm = _with_choice(_rms_norm)
layer_norm = _with_choice(_layer_norm)
cross_entropy = _with_choice(_cross_entropy)
fused_add_rms_norm = _with_choice(_fused_add_rms_norm)
fused_linear_cross_entropy = _with_choice(LigerFusedLinearCrossEntropyFunction.apply)
geglu = _with_choice(LigerGELUMulFunction.apply)
rope = _with_choice(LigerRopeFunction.apply)
softmax = _with_choice(LigerSoftmaxFunction.apply)
swiglu = _with_choice(LigerSiLUMulFunction.apply)
jsd = _with_choice(LigerJSDFunction.apply)
kl_div = _with_choice(LigerKLDivLossFunction.apply)
fused_linear_jsd = _with_choice(LigerFusedLinearJSDFunction.apply)
