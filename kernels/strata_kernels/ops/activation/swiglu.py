"""The gated activation of Llama-type feed-forward layers: `silu(gate) * up`.

Formulas and kernels: `activation_kernels.py`. Launch code: `activation_operators.py`.

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
    """`multiplier * silu(gate_multiplier * gate) * up`; on a GPU one kernel, in fp32 and rounded once.

    The multipliers are those of Falcon-H1, which applies `multiplier` after `down_proj`; the result is the same up to
    rounding.

    Args:
        gate: [..., D], bf16 | fp16 | fp32 | fp64, any strides: the halves of a packed projection are not copied.
        up: [..., D], same shape, dtype and device as gate.
        gate_multiplier: factor of the gate, before the activation.
        multiplier: factor of the result.
        weight: [H, D], weight of a following projection, or None. With it, the function returns
            `torch.nn.functional.linear(result, weight, bias)` and does not save `result` for backward.
        bias: [H], bias of that projection, or None.

    Returns:
        [..., D] in the dtype of gate, contiguous; [..., H] with a weight.

    Raises:
        ValueError: gate and up differ in shape, dtype or device; unsupported dtype; wrong shape of weight or bias.

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
    """`swiglu(*x.chunk(2, dim=-1))`; the kernel writes the gradient of x without `torch.cat`.

    Args:
        x: [..., 2 * D], bf16 | fp16 | fp32 | fp64: gate and up concatenated, as one projection returns them.
        gate_first: whether the gate is the first half of x (vLLM's silu_and_mul, Phi-3) or the second (flash-attn's
            GatedMlp).
        gate_multiplier, multiplier, weight, bias: as in `swiglu`.

    Returns:
        [..., D] in the dtype of x, contiguous; [..., H] with a weight.

    Raises:
        ValueError: odd last axis of x; unsupported dtype; wrong shape of weight or bias.

    Example:
        >>> swiglu_packed(torch.tensor([0.0, 1.0, 5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    check_packed(x)
    return activation_linear(_SWIGLU_PACKED, x, gate_first, gate_multiplier, multiplier, weight=weight, bias=bias)
