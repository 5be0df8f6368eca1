"""The operators as modules. A module stores parameters and settings and calls the operator.

Parameters have the names and shapes of transformers' Llama models, so that their state dicts load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .ops.activation.geglu import geglu, geglu_packed
from .ops.activation.relu_squared import relu_squared
from .ops.activation.swiglu import swiglu, swiglu_packed
from .ops.cross_entropy import cross_entropy
from .ops.cross_entropy.reduction import Reduction
from .ops.experts.experts import experts
from .ops.experts.experts_arguments import Function, Gate
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.norm.layer_norm import layer_norm
from .ops.norm.rms_norm import Cast, add_rms_norm, rms_norm
from .patch.structure import activate_and_project

Activation = Literal["silu", "gelu", "gelu_tanh"]

# Activation → (operator on gate and up, operator on a packed tensor, options of both).
_GATED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Any]]] = {
    "silu": (swiglu, swiglu_packed, {}),
    "gelu": (geglu, geglu_packed, {"approximate": "none"}),
    "gelu_tanh": (geglu, geglu_packed, {"approximate": "tanh"}),
}


class RMSNorm(nn.Module):
    """`rms_norm` over the last axis. The weight is initialized so that `offset + weight` is one.

    Args:
        features: size of the last axis, D.
        eps, offset, cast: as in `rms_norm`. Gemma's norm is `offset=1.0, cast="gemma"`.
        weight: whether there is a weight.

    Example:
        >>> RMSNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        cast: Cast = "llama",
        weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.offset, self.cast = features, eps, offset, cast
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if weight else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that `offset + weight` is one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        weight = "" if self.weight is not None else ", weight=False"
        return f"{self.features}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}{weight}"


class AddRMSNorm(RMSNorm):
    """`add_rms_norm`: add a layer's result to the residual stream, then normalize the sum for the next layer.

    Args: as in `RMSNorm`.

    Example:
        >>> y, residual = AddRMSNorm(4)(torch.ones(2, 4), torch.ones(2, 4))
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual: [..., D] → (norm of their sum, their sum), each [..., D]."""
        return add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset, cast=self.cast)


class LayerNorm(nn.Module):
    """`layer_norm` over the last axis.

    Args:
        features: size of the last axis, D.
        eps: added to the variance.
        weight, bias: whether there is such a parameter.

    Example:
        >>> LayerNorm(4, bias=False)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        *,
        weight: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if weight else None
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"{self.features}, eps={self.eps}, weight={self.weight is not None}, bias={self.bias is not None}"


class GatedMLP(nn.Module):
    """The gated feed-forward layer, `down_proj(activation(gate_proj(x)) * up_proj(x))`.

    Args:
        features: size of the last axis of input and output, D.
        hidden: size of the hidden layer.
        activation: "silu" (Llama, Qwen), "gelu", or "gelu_tanh" (Gemma).
        packed: gate and up are one `gate_up_proj` (Phi-3, GLM), the gate first: one matrix product instead of two,
            without copies.
        bias: whether the projections have a bias.

    Raises:
        ValueError: the activation is unknown.

    Example:
        >>> GatedMLP(8, 16, activation="gelu_tanh", packed=True)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: Activation = "silu",
        packed: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATED:
            raise ValueError(f"activation must be one of {', '.join(_GATED)}, got {activation!r}")
        self.activation, self.packed = activation, packed
        if packed:
            self.gate_up_proj = nn.Linear(features, 2 * hidden, bias, device, dtype)
        else:
            self.gate_proj = nn.Linear(features, hidden, bias, device, dtype)
            self.up_proj = nn.Linear(features, hidden, bias, device, dtype)
        self.down_proj = nn.Linear(hidden, features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        gated, packed, options = _GATED[self.activation]
        if self.packed:
            return activate_and_project(partial(packed, self.gate_up_proj(x), **options), self.down_proj)
        return activate_and_project(partial(gated, self.gate_proj(x), self.up_proj(x), **options), self.down_proj)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"activation={self.activation!r}"


class ReLUSquared(nn.Module):
    """`relu_squared`.

    Example:
        >>> ReLUSquared()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return relu_squared(x)


class Experts(nn.Module):
    """`experts` with its weights, as in transformers' Mixtral and Qwen3-MoE models; without the router.

    Args:
        experts: number of experts, E.
        features: size of the last axis of input and output, H.
        inner: hidden size of an expert, I.
        activation, gate, alpha, limit, offset: as in `experts`.
        bias: whether both projections have a bias.

    Example:
        >>> layer = Experts(4, 8, 16)
        >>> layer(torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        experts: int,
        features: int,
        inner: int,
        *,
        activation: Function = "silu",
        gate: Gate = "halves",
        alpha: float = 1.0,
        limit: float | None = None,
        offset: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "activation": activation, "gate": gate, "alpha": alpha, "limit": limit, "offset": offset
        }  # fmt: skip
        width = inner if gate == "none" else 2 * inner

        def parameter(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype).uniform_(-scale, scale))

        self.gate_up_proj = parameter(experts, width, features, scale=features**-0.5)
        self.down_proj = parameter(experts, features, inner, scale=inner**-0.5)
        self.gate_up_proj_bias = parameter(experts, width, scale=features**-0.5) if bias else None
        self.down_proj_bias = parameter(experts, features, scale=inner**-0.5) if bias else None

    def extra_repr(self) -> str:
        """Sizes and settings for `repr`."""
        experts, features, inner = self.down_proj.shape
        settings = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{experts}, {features}, {inner}, {settings}, bias={self.down_proj_bias is not None}"

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """x: [T, H], index: [T, K], weight: [T, K] → [T, H]."""
        return experts(
            x, self.gate_up_proj, self.down_proj, index, weight,
            gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias, **self.options,
        )  # fmt: skip


class _Loss(nn.Module):
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "reduction": reduction,
        }

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Loss):
    """`cross_entropy` as a module.

    Args: the keyword arguments of `cross_entropy` from `ignore_index` to `reduction`.

    Example:
        >>> CrossEntropyLoss(z_loss=1e-4)(torch.zeros(3, 8), torch.tensor([1, 2, -100])).shape
        torch.Size([])
    """

    def forward(self, logits: Tensor, target: Tensor, num_items: int | Tensor | None = None) -> Tensor:
        """logits: [..., V], target: [...] → a scalar, or [...] with reduction="none"."""
        return cross_entropy(logits, target, num_items=num_items, **self.options)


class LinearCrossEntropyLoss(_Loss):
    """`linear_cross_entropy` as a module. The head's weight is an argument of forward, so it may be tied.

    Args: the keyword arguments of `linear_cross_entropy` from `ignore_index` to `reduction`.

    Example:
        >>> head = nn.Linear(4, 8, bias=False)
        >>> LinearCrossEntropyLoss()(torch.ones(3, 4), head.weight, torch.tensor([1, 2, -100])).backward()
    """

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        num_items: int | Tensor | None = None,
    ) -> Tensor:
        """x: [..., H], weight: [V, H], target: [...], bias: [V] → a scalar, or [...] with reduction="none"."""
        return linear_cross_entropy(x, weight, target, bias=bias, num_items=num_items, **self.options)
