"""The squared ReLU of Primer and Nemotron feed-forward layers, which have no gate.

The formulas and the kernels are in `activation_kernels.py`, how they are launched in `activation_operators.py`.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import UNGATED, check_ungated, define

_RELU_SQUARED = define("relu_squared", "relu2", UNGATED)


def relu_squared(x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`torch.relu(x).square()`; on a GPU fused, computed in fp32 and rounded once.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides.
        weight: [H, D], of a projection that follows, or None: the result is then
            `torch.nn.functional.linear(result, weight, bias)`, and what lies between is not kept for the backward pass.
        bias: [H], of that projection.

    Returns:
        [..., D], contiguous, in the dtype of x; [..., H] with a weight.

    Raises:
        ValueError: x has no axis or another dtype; weight or bias do not fit.

    Example:
        >>> relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    check_ungated(x)
    return activation_linear(_RELU_SQUARED, x, weight=weight, bias=bias)
