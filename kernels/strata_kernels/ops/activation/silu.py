"""The SiLU (Swish) of feed-forward layers without a gate, as those of Conformers.

The formulas and the kernels are in `activation_kernels.py`, how they are launched in `activation_operators.py`.

Source: Ramachandran et al., "Searching for Activation Functions", 2017 (arXiv:1710.05941).
"""

from __future__ import annotations

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import UNGATED, check_ungated, define

_SILU = define("silu", "silu", UNGATED)


def silu(x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.silu(x)`; on a GPU computed in fp32 and rounded once.

    Without a weight, it moves as many bytes as PyTorch's function. With a weight, the activation is not kept: the
    backward kernel writes it again, one of the six itemsizes that it moves per element.

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
        >>> silu(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([-0.2689,  0.0000,  2.8577])
    """
    check_ungated(x)
    return activation_linear(_SILU, x, weight=weight, bias=bias)
