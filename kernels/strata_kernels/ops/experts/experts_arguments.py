"""Types and checks of the arguments of `experts`."""

from __future__ import annotations

from math import isfinite
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from .._launch import DTYPES, describe, has_dtype
from .experts_launch import inner_of

Gate = Literal["halves", "interleaved", "none"]
Function = Literal["silu", "gelu", "gelu_tanh", "relu2"]


class LowRank(NamedTuple):
    """LoRA adapters of the weights W [E, N, K] of all experts: W + scale · b · a.

    a: [E, R, K]. b: [E, N, R]. Dtype of the weights, any strides.
    """

    a: Tensor
    b: Tensor
    scale: float


def check(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, gate: str,
) -> None:  # fmt: skip
    """Raise ValueError for a wrong shape, dtype or device, or an unknown activation or gate."""
    for name, value, known in (("activation", activation, Function), ("gate", gate, Gate)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {value!r}")
    if x.dim() != 2 or not has_dtype(x):
        raise ValueError(f"x must be {DTYPES} of shape [T, H], got {describe(x)}")
    if index.dim() != 2 or index.is_floating_point() or index.shape[0] != x.shape[0] or index.shape[1] == 0:
        raise ValueError(f"index must hold integers of shape [{x.shape[0]}, K], got {describe(index)}")
    if weight.shape != index.shape or not weight.is_floating_point():
        raise ValueError(f"weight must be floating-point of shape {list(index.shape)}, got {describe(weight)}")
    if gate_up.dim() != 3 or gate_up.shape[2] != x.shape[1] or (gate != "none" and gate_up.shape[1] % 2):
        size = "I" if gate == "none" else "2 * I"
        raise ValueError(f"gate_up must have the shape [E, {size}, {x.shape[1]}], got {describe(gate_up)}")
    experts, width, inner = gate_up.shape[0], gate_up.shape[1], inner_of(gate_up.shape[1], gate)
    shapes = (
        ("down", down, (experts, x.shape[1], inner)),
        ("gate_up_bias", gate_up_bias, (experts, width)),
        ("down_bias", down_bias, (experts, x.shape[1])),
    )
    for name, tensor, shape in shapes:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {describe(tensor)}")
    for name, tensor in (("gate_up", gate_up), *((name, tensor) for name, tensor, _ in shapes)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {describe(tensor)}")
    for name, tensor in (("index", index), ("weight", weight), ("gate_up", gate_up), ("down", down)):
        if tensor.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {tensor.device}: move one of them")


def check_adapters(x: Tensor, *adapted: tuple[str, Tensor, LowRank | None]) -> None:
    """Raise ValueError for an adapter that does not match its weight; adapted: (name, weight, adapter)."""
    for name, weight, adapter in adapted:
        if adapter is None:
            continue
        (experts, outputs, inputs), rank = weight.shape, adapter.a.shape[1] if adapter.a.dim() == 3 else "R"
        shapes = (("a", adapter.a, (experts, rank, inputs)), ("b", adapter.b, (experts, outputs, rank)))
        for part, tensor, shape in shapes:
            if tuple(tensor.shape) != shape or tensor.dtype != x.dtype or tensor.device != x.device:
                expected = f"[{', '.join(map(str, shape))}], {x.dtype}, on {x.device}"
                raise ValueError(f"{name}_adapter.{part} must be {expected}, got {describe(tensor)} on {tensor.device}")
        if type(adapter.scale) is not float or not isfinite(adapter.scale):
            raise ValueError(f"{name}_adapter.scale must be a finite float, got {adapter.scale!r}")
