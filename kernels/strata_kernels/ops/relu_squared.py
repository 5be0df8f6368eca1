"""The squared ReLU of Primer and Nemotron feed-forward layers, which have no gate.

The formulas, the kernels and how they are launched are in `_activation.py`.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from torch import Tensor

from ._activation import SINGLE, define
from ._launch import DTYPES, describe, has_dtype

_relu_squared = define("relu_squared", "relu2", SINGLE)


def relu_squared(x: Tensor) -> Tensor:
    """`torch.relu(x).square()`; on a GPU fused, computed in fp32 and rounded once.

    Args:
        x: [..., D], bf16 | fp16 | fp32 | fp64, of any strides.

    Returns:
        [..., D], contiguous, in the dtype of x.

    Raises:
        ValueError: x has no axis or another dtype.

    Example:
        >>> relu_squared(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """
    if not has_dtype(x) or x.dim() == 0:
        raise ValueError(f"x must be {DTYPES} of shape [..., D], got {describe(x)}")
    y: Tensor = _relu_squared(x)
    return y
