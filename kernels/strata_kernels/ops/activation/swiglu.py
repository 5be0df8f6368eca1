"""The gated activation of Llama-type feed-forward layers: `silu(gate) * up`.

The formulas and the kernels are in `activation_kernels.py`, how they are launched in `activation_operators.py`.

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import GATED, PACKED, check_gated, check_packed, define

_SWIGLU = define("swiglu", "silu", GATED)
_SWIGLU_PACKED = define("swiglu_packed", "silu", PACKED)


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`multiplier * silu(gate_multiplier * gate) * up`; on a GPU fused, computed in fp32 and rounded once.

    The multipliers are those of Falcon-H1. It applies the second one after `down_proj`; before it, the result is the
    same up to rounding.

    Args:
        gate: [..., D], bf16 | fp16 | fp32 | fp64, of any strides: halves of one projection are read in place.
        up: the same shape, dtype and device.
        gate_multiplier: of the gate, before the activation.
        multiplier: of the result.
        weight: [H, D], of a projection that follows, or None: the result is then
            `torch.nn.functional.linear(result, weight, bias)`, and what lies between is not kept for the backward pass.
        bias: [H], of that projection.

    Returns:
        [..., D], contiguous, in the dtype of gate; [..., H] with a weight.

    Raises:
        ValueError: gate and up differ in shape, dtype or device, or have another dtype; weight or bias do not fit.

    Example:
        >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    check_gated(gate, up)
    return activation_linear(_SWIGLU, gate, up, gate_multiplier, multiplier, weight=weight, bias=bias)


def swiglu_packed(
    x: Tensor,
    *,
    gate_first: bool = True,
    gate_multiplier: float = 1.0,
    multiplier: float = 1.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`swiglu(*x.chunk(2, dim=-1))`; the gradient of x is written as one tensor, without a concatenation.

    Args:
        x: [..., 2 * D], bf16 | fp16 | fp32 | fp64: gate and up side by side, of one projection.
        gate_first: whether the gate is the first half, as in vLLM's silu_and_mul and in Phi-3; the second otherwise, as
            in flash-attn's GatedMlp.
        gate_multiplier, multiplier, weight, bias: as in `swiglu`.

    Returns:
        [..., D], contiguous, in the dtype of x; [..., H] with a weight.

    Raises:
        ValueError: x has an odd last size or another dtype; weight or bias do not fit.

    Example:
        >>> swiglu_packed(torch.tensor([0.0, 1.0, 5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    check_packed(x)
    return activation_linear(_SWIGLU_PACKED, x, gate_first, gate_multiplier, multiplier, weight=weight, bias=bias)
