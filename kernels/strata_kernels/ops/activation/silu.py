"""SiLU (Swish), for feed-forward layers without a gate, e.g. Conformers.

Formulas and kernels: `activation_kernels.py`. Launch code: `activation_operators.py`.

Source: Ramachandran et al., "Searching for Activation Functions", 2017 (arXiv:1710.05941).
"""

from __future__ import annotations

from torch import Tensor

from .activation_linear import activation_linear
from .activation_operators import UNGATED, check_ungated, define

_SILU = define("silu", "silu", UNGATED)


def silu(x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.silu(x)`; on a GPU computed in fp32 and rounded once.

    Without a weight, it moves as many bytes as PyTorch's function. With a weight, the result of the activation is not
    saved; the backward kernel writes it again, which is one of the 6·itemsize bytes per element that it then moves.

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
        >>> silu(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([-0.2689,  0.0000,  2.8577])
    """
    check_ungated(x)
    return activation_linear(_SILU, x, weight=weight, bias=bias)
