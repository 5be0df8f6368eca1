"""Liger's feed-forward layers: autograd functions of activations, modules with transformers' names, experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ...ops.activation.geglu import geglu
from ...ops.activation.relu_squared import relu_squared
from ...ops.activation.swiglu import swiglu, swiglu_packed
from ...ops.activation.tiled_mlp import Activation, tiled_mlp
from ...ops.experts.experts import experts
from ...patch.structure import activate_and_project


class LigerSiLUMulFunction:
    """`swiglu`."""

    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        """a, b: [..., D] → [..., D]: `down_multiplier * silu(gate_multiplier * a) * b`."""
        return swiglu(a, b, gate_multiplier=gate_multiplier, multiplier=down_multiplier)


class LigerFusedGateUpSiLUMulFunction:
    """`swiglu_packed`."""

    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """y: [..., 2 * D] → [..., D]."""
        return swiglu_packed(y)


class LigerGELUMulFunction:
    """`geglu` with the tanh approximation."""

    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        """a, b: [..., D] → [..., D]: `gelu(a, approximate="tanh") * b`."""
        return geglu(a, b, "tanh")


class LigerReLUSquaredFunction:
    """`relu_squared`."""

    @staticmethod
    def apply(X: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return relu_squared(X)


class LigerMLPFunction:
    """The gated feed-forward layer: three weights, no biases."""

    @staticmethod
    def apply(
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:
        """input: [..., H], gate_weight, up_weight: [I, H], down_weight: [H, I] → [..., H]."""
        gate, up = linear(input, gate_weight), linear(input, up_weight)
        return swiglu(gate, up, gate_multiplier=gate_multiplier, multiplier=down_multiplier, weight=down_weight)


class LigerFusedMoEFunction:
    """`experts`."""

    @staticmethod
    def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x: [T, H], gate_up_proj: [E, 2 * I, H], down_proj: [E, H, I], the last two: [T, K] → [T, H]."""
        return experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


class LigerReLUSquared(nn.Module):
    """`relu_squared`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return LigerReLUSquaredFunction.apply(x)


def _check_activation(activation: str | None) -> None:
    if activation not in ("silu", "swish"):
        raise ValueError(f"Activation function {activation!r} not supported: these layers compute SwiGLU, by silu")


class _Gated(nn.Module):
    """The three linear layers of a gated feed-forward layer, with the names of transformers."""

    def __init__(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)


class LigerSwiGLUMLP(_Gated):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases, as in Liger."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self._check(config)

    def _check(self, config: Any) -> None:
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(swiglu, self.gate_proj(x), self.up_proj(x)), self.down_proj)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`."""


class LigerMLP(LigerSwiGLUMLP):
    """As `LigerSwiGLUMLP`, with the hidden size of the configuration."""

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


class LigerFalconH1SwiGLUMLP(_Gated):
    """`down_multiplier * down_proj(silu(gate_multiplier * gate_proj(x)) * up_proj(x))`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, bias=getattr(config, "mlp_bias", False))
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers
        _check_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        gated = partial(swiglu, self.gate_proj(x), self.up_proj(x), gate_multiplier=self.gate_multiplier)
        # After the projection, because it may have a bias.
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
    """`experts` with uninitialized weights, as in transformers and Liger."""

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
        """hidden_states: [..., H]; top_k_index, top_k_weights: [..., K] → [..., H]."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        index, weight = (t.reshape(-1, t.shape[-1]) for t in (top_k_index, top_k_weights))
        y: Tensor = LigerFusedMoEFunction.apply(tokens, self.gate_up_proj, self.down_proj, index, weight)
        return y.reshape(hidden_states.shape)


class LigerGEGLUMLP(_Gated):
    """`down_proj(gelu(gate_proj(x)) * up_proj(x))` with the tanh approximation, without biases."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]."""
        return activate_and_project(partial(geglu, self.gate_proj(x), self.up_proj(x), "tanh"), self.down_proj)


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """As `LigerGEGLUMLP`, with the constructor of Gemma 4's layers; layers with shared keys may be twice as wide."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        wide = getattr(config, "use_double_wide_mlp", False) and layer_idx is not None
        wide = wide and shared > 0 and layer_idx >= config.num_hidden_layers - shared
        super().__init__(config, config.intermediate_size * (2 if wide else 1))


def _shards(x: Tensor, num_shards: int | None) -> int:
    """Liger's number of shards of x [..., T, H]; default ceil(T / H)."""
    length, width = x.shape[-2:]
    return max(-(-length // width) if num_shards is None else num_shards, 1)


class LigerTiledMLPFunction:
    """A row-wise module, applied to shards of the sequence with `torch.utils.checkpoint`.

    Autograd sums the gradients of the shards before they reach the parameters.
    """

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        mlp_module: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """x: [..., T, H] → the concatenated results of `fn(mlp_module, shard)`."""
        run = partial(checkpoint, fn, mlp_module, use_reentrant=False)
        return torch.cat([run(part) for part in x.chunk(shards, dim=-2)], dim=-2)


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor],
    mlp_module: Any,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[Tensor] | None = None,
) -> Tensor:
    """`LigerTiledMLPFunction.apply`, with Liger's default number of shards."""
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, _shards(x, num_shards), compute_params)


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` by `tiled_mlp`."""

    activation: Activation = "silu"

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config)
        self.num_shards = num_shards

    def _check(self, config: Any) -> None:
        _check_activation(getattr(config, "hidden_act", "silu"))

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, H] → [..., T, H]."""
        tile = -(-x.shape[:-1].numel() // _shards(x, self.num_shards))
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return tiled_mlp(x, *weights, activation=self.activation, tile=max(tile, 1))


class LigerTiledGEGLUMLP(LigerTiledSwiGLUMLP):
    """`LigerGEGLUMLP` by `tiled_mlp`."""

    activation: Activation = "gelu_tanh"

    def _check(self, config: Any) -> None:
        activation = getattr(config, "hidden_act", "gelu")
        if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"Activation function {activation!r} not supported: this layer computes GeGLU, by gelu")


liger_geglu: Callable[..., Tensor] = LigerGELUMulFunction.apply
liger_swiglu: Callable[..., Tensor] = LigerSiLUMulFunction.apply


def liger_relu_squared(x: Tensor) -> Tensor:
    """`relu_squared`."""
    return relu_squared(x)
