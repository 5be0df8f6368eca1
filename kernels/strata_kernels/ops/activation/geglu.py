"""The gated activation of Gemma-type feed-forward layers: `gelu(gate) * up`.

The formulas and the kernels are in `activation_kernels.py`, how they are launched in `activation_operators.py`.

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202); Hendrycks and Gimpel, "Gaussian Error
Linear Units", 2016 (arXiv:1606.08415).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import GATED, PACKED, Activation, check_gated, check_packed, define

Approximate = Literal["none", "tanh"]

_GEGLU = {"none": define("geglu", "gelu", GATED), "tanh": define("geglu_tanh", "gelu_tanh", GATED)}
_GEGLU_PACKED = {
    "none": define("geglu_packed", "gelu", PACKED),
    "tanh": define("geglu_tanh_packed", "gelu_tanh", PACKED),
}


def geglu(
    gate: Tensor,
    up: Tensor,
    approximate: Approximate = "none",
    *,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`multiplier * gelu(gate_multiplier * gate, approximate=approximate) * up`, fused, in fp32 and rounded once.

    Args:
        gate: [..., D], bf16 | fp16 | fp32 | fp64, of any strides: halves of one projection are read in place.
        up: the same shape, dtype and device.
        approximate: "none" for the error function, "tanh" for the approximation that Gemma was trained with
            (`gelu_pytorch_tanh` in transformers' configs).
        gate_multiplier: of the gate, before the activation.
        multiplier: of the result.
        weight: [H, D], of a projection that follows, or None: the result is then
            `torch.nn.functional.linear(result, weight, bias)`, and what lies between is not kept for the backward pass.
        bias: [H], of that projection.

    Returns:
        [..., D], contiguous, in the dtype of gate; [..., H] with a weight.

    Raises:
        ValueError: gate and up differ in shape, dtype or device, another dtype, or an unknown approximation; weight or
            bias do not fit.

    Example:
        >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.6827])
    """
    check_gated(gate, up)
    activation = _selected(_GEGLU, approximate)
    return activation_linear(activation, gate, up, gate_multiplier, multiplier, weight=weight, bias=bias)


def geglu_packed(
    x: Tensor,
    approximate: Approximate = "none",
    *,
    gate_first: bool = True,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`geglu(*x.chunk(2, dim=-1), approximate)`; the gradient of x is written as one tensor, without a concatenation.

    Args:
        x: [..., 2 * D], bf16 | fp16 | fp32 | fp64: gate and up side by side, of one projection.
        approximate: as in `geglu`.
        gate_first: whether the gate is the first half; the second otherwise.
        gate_multiplier, multiplier, weight, bias: as in `geglu`.

    Returns:
        [..., D], contiguous, in the dtype of x; [..., H] with a weight.

    Raises:
        ValueError: x has an odd last size, another dtype, or an unknown approximation; weight or bias do not fit.

    Example:
        >>> geglu_packed(torch.tensor([0.0, 1.0, 5.0, 2.0]), "tanh")
        tensor([0.0000, 1.6824])
    """
    check_packed(x)
    activation = _selected(_GEGLU_PACKED, approximate)
    return activation_linear(activation, x, gate_first, gate_multiplier, multiplier, weight=weight, bias=bias)


def _selected(activations: dict[str, Activation], approximate: str) -> Activation:
    if approximate not in activations:
        raise ValueError(f"approximate must be one of {', '.join(get_args(Approximate))}, got {approximate!r}")
    return activations[approximate]
