"""The gated activation of Gemma-type feed-forward layers: `gelu(gate) * up`.

Formulas and kernels: `activation_kernels.py`. Launch code: `activation_operators.py`.

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
    """`multiplier * gelu(gate_multiplier * gate, approximate=approximate) * up`, in fp32, rounded once.

    Args:
        gate: [..., D], bf16 | fp16 | fp32 | fp64, any strides: the halves of a packed projection are not copied.
        up: [..., D], same shape, dtype and device as gate.
        approximate: "none" for the error function, "tanh" for the approximation that Gemma was trained with
            (`gelu_pytorch_tanh` in transformers' configs).
        gate_multiplier: factor of the gate, before the activation.
        multiplier: factor of the result.
        weight: [H, D], weight of a following projection, or None. With it, the function returns
            `torch.nn.functional.linear(result, weight, bias)` and does not save `result` for backward.
        bias: [H], bias of that projection, or None.

    Returns:
        [..., D] in the dtype of gate, contiguous; [..., H] with a weight.

    Raises:
        ValueError: gate and up differ in shape, dtype or device; unsupported dtype; unknown `approximate`; wrong shape
            of weight or bias.

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
    """`geglu(*x.chunk(2, dim=-1), approximate)`; the kernel writes the gradient of x without `torch.cat`.

    Args:
        x: [..., 2 * D], bf16 | fp16 | fp32 | fp64: gate and up concatenated, as one projection returns them.
        approximate: as in `geglu`.
        gate_first: whether the gate is the first half of x, or the second.
        gate_multiplier, multiplier, weight, bias: as in `geglu`.

    Returns:
        [..., D] in the dtype of x, contiguous; [..., H] with a weight.

    Raises:
        ValueError: odd last axis of x; unsupported dtype; unknown `approximate`; wrong shape of weight or bias.

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
