"""Liger's norms: autograd functions whose `apply` has Liger's positional arguments, modules and functional forms.

They call operators of `strata_kernels`, which register their backward: no class of this package is a
`torch.autograd.Function`. Results have Liger's dtypes. `in_place`, `row_mode` and other arguments that select a kernel
of Liger are ignored: no tensor of the caller is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ...ops.norm.layer_norm import layer_norm
from ...ops.norm.rms_norm import Cast, add_rms_norm, rms_norm

Initial = Literal["ones", "zeros"]


_CASTS: dict[str | int, Cast] = {"llama": "llama", "gemma": "gemma", "none": "none", 0: "llama", 1: "gemma", -1: "none"}


def cast_of(casting_mode: str | int) -> Cast:
    """The `cast` of `rms_norm` for a casting mode. Raises ValueError for an unknown mode."""
    if casting_mode not in _CASTS:
        raise ValueError(f"casting_mode must be one of {', '.join(map(repr, _CASTS))}, got {casting_mode!r}")
    return _CASTS[casting_mode]


def initial(size: int, init_fn: str) -> nn.Parameter:
    """A parameter of ones or zeros."""
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNormFunction:
    """`rms_norm`."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        """X: [..., D], W: [D] → [..., D], in the dtype of X."""
        return rms_norm(X, W, eps, offset=offset, cast=cast_of(casting_mode)).to(X.dtype)


class LigerFusedAddRMSNormFunction:
    """`add_rms_norm`."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """X, R: [..., D], W: [D] → (norm of X + R, X + R), each [..., D] in the dtype of X."""
        y, h = add_rms_norm(X, R, W, eps, offset=offset, cast=cast_of(casting_mode))
        return y.to(X.dtype), h


class LigerLayerNormFunction:
    """`layer_norm`."""

    @staticmethod
    def apply(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
        """X: [..., D], W, B: [D] → [..., D]."""
        return layer_norm(X, W, B, eps)


class LigerRMSNorm(nn.Module):
    """`rms_norm`. `in_place` and `row_mode` are stored as attributes, but ignored."""

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: Initial = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", initial(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """`LigerRMSNorm` with Gemma's defaults: `1 + weight`, rounded once."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: Initial = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """As `LigerRMSNormForGemma`; in Liger, they overwrite different tensors."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: Initial = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """As `LigerRMSNormForGemma2`."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """As `LigerRMSNormForGemma2`."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """As `LigerRMSNormForGemma`; the size is called `dim`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: Initial = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4's: the weight itself, rounded once; no weight without `with_scale`."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: Initial = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """As `LigerRMSNormForGemma4`; `dim` is optional without a weight."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: Initial = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        if dim is None and with_scale:
            raise ValueError("dim is missing: pass the size of the weight, or with_scale=False for a norm without one")
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """As `LigerRMSNorm`; in Liger, they overwrite different tensors."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: Initial = "ones",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """As `LigerRMSNormForOlmo2`."""


class LigerFusedAddRMSNorm(nn.Module):
    """`add_rms_norm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: Initial = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.weight = initial(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states, residual: [..., D] → (norm of their sum, their sum), each [..., D]."""
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """`layer_norm`. As in Liger, it always has a bias, initially zero, or random with `bias=True`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: Initial = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = initial(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"{self.hidden_size}, eps={self.eps}"


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """`rms_norm`. X: [..., D], W: [D]."""
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`. X, R: [..., D], W: [D]."""
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


liger_layer_norm: Callable[..., Tensor] = LigerLayerNormFunction.apply
