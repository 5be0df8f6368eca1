"""Liger's other norms: modulated RMSNorm, GroupNorm, PolyNorm and DyT; conventions as in `norms`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...ops.dyt import dyt
from ...ops.group_norm import group_norm
from ...ops.norm.modulated_norm import modulated_rms_norm
from ...ops.poly_norm import poly_norm
from .norms import Initial, LigerRMSNorm, cast_of, initial


class LigerModulatedRMSNormFunction:
    """`modulated_rms_norm`, which rounds once; `casting_mode` is ignored."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
    ) -> Tensor:
        """X: [..., D], W: [D], scale, shift: [M, D], each row for N / M consecutive rows of X → [..., D]."""
        cast_of(casting_mode)
        width = X.shape[-1]
        rows = X.reshape(max(scale.numel() // width, 1), -1, width)
        moved = None if shift is None else shift.reshape(-1, width)
        return modulated_rms_norm(rows, scale.reshape(-1, width), moved, W, eps, offset=offset).view(X.shape)


class LigerGroupNormFunction:
    """`group_norm`."""

    @staticmethod
    def apply(
        X: Tensor,
        affine_scaling_weight: Tensor,
        affine_shifting_bias: Tensor,
        num_channels: int,
        num_groups: int,
        eps: float,
    ) -> Tensor:
        """X: [B, C, ...], weight and bias: [C] → the shape of X."""
        return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


class LigerPolyNormFunction:
    """`poly_norm`."""

    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
        """X: [..., D], W: [3], B: one element → [..., D]."""
        return poly_norm(X, W, B, eps)


class LigerDyTFunction:
    """`dyt`."""

    @staticmethod
    def apply(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        """x: [..., D], alpha: one element, gamma, beta: [D] → [..., D]."""
        return dyt(x, alpha, gamma, beta)


class LigerModulatedRMSNorm(LigerRMSNorm):
    """`LigerRMSNorm`, then `* (1 + scale) + shift`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: Initial = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, None, elementwise_affine)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        """As `LigerModulatedRMSNormFunction.apply`."""
        return LigerModulatedRMSNormFunction.apply(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerGroupNorm(nn.Module):
    """`group_norm`. As in Liger, it always has a bias, initially zero, or random with `bias=True`."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: Initial = "ones"
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(f"num_groups {num_groups} must divide num_channels {num_channels}")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = initial(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, C, ...] → the same shape."""
        return group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


class LigerPolyNorm(nn.Module):
    """`poly_norm` with its parameters: weights initially 1/3, bias 1."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"eps={self.variance_epsilon}"


class LigerDyT(nn.Module):
    """`dyt` with its parameters."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha, self.gamma = nn.Parameter(torch.full((1,), init_alpha)), nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """`modulated_rms_norm`. As `LigerModulatedRMSNormFunction.apply`."""
    return LigerModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting_mode)


liger_group_norm: Callable[..., Tensor] = LigerGroupNormFunction.apply
liger_poly_norm: Callable[..., Tensor] = LigerPolyNormFunction.apply
liger_dyt: Callable[..., Tensor] = LigerDyTFunction.apply
