"""Squared ReLU, for the ungated feed-forward layers of Primer and Nemotron.

Formulas and kernels: `activation_kernels.py`. Launch code: `activation_operators.py`.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import UNGATED, check_ungated, define

_RELU_SQUARED = define("relu_squared", "relu2", UNGATED)


def relu_squared(x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`torch.relu(x).square()`; on a GPU one kernel, in fp32 and rounded once.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, any strides.
        weight: [H, D], weight of a following projection, or None. With it, the function returns
            `torch.nn.functional.linear(result, weight, bias)` and does not save `result` for backward.
        bias: [H], bias of that projection, or None.

    Returns:
        [..., D] in the dtype of x, contiguous; [..., H] with a weight.

    Raises:
        ValueError: x is 0-d or has an unsupported dtype; wrong shape of weight or bias.

    Example:
        >>> relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    check_ungated(x)
    return activation_linear(_RELU_SQUARED, x, weight=weight, bias=bias)
