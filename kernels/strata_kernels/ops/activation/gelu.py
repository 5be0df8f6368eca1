"""GELU, for feed-forward layers without a gate: vision towers, GPT-NeoX, Phi, StarCoder 2.

Formulas and kernels: `activation_kernels.py`. Launch code: `activation_operators.py`.

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

    Without a weight, it moves as many bytes as PyTorch's function. With a weight, the result of the activation is not
    saved; the backward kernel writes it again, which is one of the 6·itemsize bytes per element that it then moves.
    PyTorch has no function for `approximate="sigmoid"`; its separate operators move 21·itemsize bytes per element.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides.
        approximate: "none" for the error function; "tanh" for its approximation (`gelu_pytorch_tanh`, `gelu_new` and
            `gelu_fast` in transformers' configs); "sigmoid" for `x * torch.sigmoid(1.702 * x)` (`quick_gelu`).
        weight: [H, D], weight of a following projection, or None. With it, the function returns
            `torch.nn.functional.linear(result, weight, bias)` and does not save `result` for backward.
        bias: [H], bias of that projection, or None.

    Returns:
        [..., D] in the dtype of x, contiguous; [..., H] with a weight.

    Raises:
        ValueError: x is 0-d or has an unsupported dtype; unknown `approximate`; wrong shape of weight or bias.

    Example:
        >>> gelu(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([-0.1587,  0.0000,  2.9960])
    """
    check_ungated(x)
    if approximate not in _GELU:
        raise ValueError(f"approximate must be one of {', '.join(get_args(Approximation))}, got {approximate!r}")
    return activation_linear(_GELU[approximate], x, weight=weight, bias=bias)
