"""Activations in plain PyTorch: results, and gradients of gate and up."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# f(x), and (dy, x) -> dy · f'(x).
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    # silu(1.702 · x) / 1.702, so that its derivative is silu's at 1.702 · x.
    "quick_gelu": (
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda dy, x: torch.ops.aten.silu_backward(dy, 1.702 * x),
    ),
    "relu2": (lambda x: torch.relu(x).square(), lambda dy, x: dy * (2 * torch.relu(x))),
}


def forward_reference(
    function: str, gate: Tensor, up: Tensor | None, gate_multiplier: float, multiplier: float
) -> Tensor:
    """`multiplier * f(gate_multiplier * gate) * up`, contiguous; without the last factor if `up` is None."""
    y = FUNCTIONS[function][0](_times(gate, gate_multiplier))
    return _times(y if up is None else y * up, multiplier).contiguous()


def backward_reference(
    function: str, dy: Tensor, gate: Tensor, up: Tensor | None, gate_multiplier: float, multiplier: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of gate and up, contiguous."""
    f, pull = FUNCTIONS[function]
    x, dy = _times(gate, gate_multiplier), _times(dy, multiplier)
    d_gate = _times(pull(dy if up is None else dy * up, x), gate_multiplier).contiguous()
    return d_gate, None if up is None else (dy * f(x)).contiguous()


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier
