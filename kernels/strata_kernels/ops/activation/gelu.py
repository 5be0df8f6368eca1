"""The GELU of feed-forward layers without a gate, as those of vision towers, GPT-NeoX, Phi and StarCoder 2.

The formulas and the kernels are in `activation_kernels.py`, how they are launched in `activation_operators.py`.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (arXiv:1606.08415).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import UNGATED, check_ungated, define

Approximation = Literal["none", "tanh", "sigmoid"]

_GELU = {
    "none": define("gelu", "gelu", UNGATED),
    "tanh": define("gelu_tanh", "gelu_tanh", UNGATED),
    "sigmoid": define("quick_gelu", "quick_gelu", UNGATED),
}


def gelu(
    x: Tensor, approximate: Approximation = "none", *, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.gelu(x, approximate=approximate)`; on a GPU computed in fp32 and rounded once.

    Without a weight, it moves as many bytes as PyTorch's function. With a weight, the activation is not kept: the
    backward kernel writes it again, one of the six itemsizes that it moves per element. PyTorch has no function for
    `approximate="sigmoid"`; the products and the sigmoid move 21 itemsizes per element there.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides.
        approximate: "none" for the error function; "tanh" for its approximation (`gelu_pytorch_tanh`, `gelu_new` and
            `gelu_fast` in transformers' configs); "sigmoid" for `x * torch.sigmoid(1.702 * x)` (`quick_gelu`).
        weight: [H, D], of a projection that follows, or None: the result is then
            `torch.nn.functional.linear(result, weight, bias)`, and what lies between is not kept for the backward pass.
        bias: [H], of that projection.

    Returns:
        [..., D], contiguous, in the dtype of x; [..., H] with a weight.

    Raises:
        ValueError: x has no axis or another dtype; the approximation is unknown; weight or bias do not fit.

    Example:
        >>> gelu(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([-0.1587,  0.0000,  2.9960])
    """
    check_ungated(x)
    if approximate not in _GELU:
        raise ValueError(f"approximate must be one of {', '.join(get_args(Approximation))}, got {approximate!r}")
    return activation_linear(_GELU[approximate], x, weight=weight, bias=bias)
