"""`liger_kernel.transformers`: the modules, with Liger's constructors and names of parameters and attributes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...ops.activation.geglu import geglu
from ...ops.activation.swiglu import swiglu, swiglu_packed
from ...patch.structure import activate_and_project
from .functions import (
    LigerFusedAddRMSNormFunction,
    LigerFusedMoEFunction,
    LigerLayerNormFunction,
    LigerReLUSquaredFunction,
    LigerRMSNormFunction,
    LigerSparsemaxFunction,
)

Initial = Literal["ones", "zeros"]


def _initial(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    """`rms_norm`. `in_place` and `row_mode` are kept as attributes and change nothing."""

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
        self.register_parameter("weight", _initial(hidden_size, init_fn) if elementwise_affine else None)
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
    """`LigerRMSNorm` with the defaults of Gemma: `1 + weight`, rounded once."""

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
    """As `LigerRMSNormForGemma`; in Liger the two differ in what they overwrite."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """As `LigerRMSNormForGemma`."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma):
    """As `LigerRMSNormForGemma`."""


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
    """As `LigerRMSNormForGemma4`."""


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """As `LigerRMSNorm`; in Liger the two differ in what they overwrite."""


class LigerRMSNormForGlm4(LigerRMSNorm):
    """As `LigerRMSNorm`; in Liger the two differ in what they overwrite."""


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
        self.weight = _initial(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Both [..., D] → the norm of their sum, and the sum."""
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """`layer_norm`. As Liger's it always has a bias, zero at first, or random with `bias=True`."""

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
        self.weight = _initial(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        """The settings for `repr`."""
        return f"{self.hidden_size}, eps={self.eps}"


class LigerReLUSquared(nn.Module):
    """`relu_squared`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return LigerReLUSquaredFunction.apply(x)


class LigerSparsemax(nn.Module):
    """`sparsemax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The shape of x."""
        return LigerSparsemaxFunction.apply(x, self.dim)


def _check_activation(activation: str | None) -> None:
    if activation not in ("silu", "swish"):
        raise ValueError(f"Activation function {activation!r} not supported: these layers compute SwiGLU, by silu")


class LigerSwiGLUMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases as Liger's."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self._check(config)

    def _check(self, config: Any) -> None:
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(swiglu, self.gate_proj(x), self.up_proj(x)), self.down_proj)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`."""


class LigerMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`; the size of the hidden layer is the configuration's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerSwiGLUMLPForMuseGlimmer(LigerMLP):
    """As `LigerSwiGLUMLP`; the configuration calls the activation `hidden_activation`."""

    def _check(self, config: Any) -> None:
        _check_activation(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`, with the constructor of HunYuan's layers."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(nn.Module):
    """`down_multiplier * down_proj(silu(gate_multiplier * gate_proj(x)) * up_proj(x))`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        gated = partial(swiglu, self.gate_proj(x), self.up_proj(x), gate_multiplier=self.gate_multiplier)
        # After the projection, which may have a bias.
        y: Tensor = activate_and_project(gated, self.down_proj) * self.down_multiplier
        return y


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """As `LigerFalconH1SwiGLUMLP`."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """`down_proj(silu(gate) * up)` of the halves of `gate_up_proj(x)`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(swiglu_packed, self.gate_up_proj(x)), self.down_proj)


class LigerBlockSparseTop2MLP(nn.Module):
    """One expert of Mixtral: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(swiglu, self.w1(x), self.w3(x)), self.w2)


class LigerExperts(nn.Module):
    """`experts` with the weights of a mixture, not initialized, as transformers' and Liger's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = next(getattr(config, name) for name in names if hasattr(config, name))
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.hidden_dim = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        _check_activation(config.hidden_act)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H], and the indices and weights of the experts of each token, [..., K] → [..., H]."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        index, weight = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        y: Tensor = LigerFusedMoEFunction.apply(tokens, self.gate_up_proj, self.down_proj, index, weight)
        return y.reshape(hidden_states.shape)


class LigerGEGLUMLP(nn.Module):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))`, by the tanh approximation, without biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(geglu, self.gate_proj(x), self.up_proj(x), "tanh"), self.down_proj)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """As `LigerGEGLUMLP`, with the constructor of Gemma 4's layers; those that share keys may be twice as wide."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config)
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        wide = getattr(config, "use_double_wide_mlp", False) and layer_idx is not None
        if wide and shared > 0 and layer_idx >= config.num_hidden_layers - shared:
            self.intermediate_size *= 2
            self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
            self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
            self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
