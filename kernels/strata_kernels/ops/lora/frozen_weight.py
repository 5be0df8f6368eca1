"""Matrix products with a frozen weight, which is stored in one of three formats.

The input of such a product is not saved: its gradient depends only on the weight.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..float8.cast import cast, transpose
from ..float8.largest import largest_of
from ..float8.linear import cast_input
from ..float8.product import product


class Frozen(Protocol):
    """Protocol of a frozen weight W [N, K]."""

    @property
    def outputs(self) -> int:
        """N."""

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`. x: [..., K], y: [T, N]."""

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Add `dy @ W` to an entry of `products` in place, or append it. dy: [..., N], products: [T, K] each."""


def rows_of(x: Tensor) -> Tensor:
    """[..., K] → [T, K]."""
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class ExactWeight:
    """weight: [N, K], in the dtype of the input."""

    weight: Tensor

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`."""
        if bias is None:
            torch.mm(rows_of(x), self.weight.t(), out=y)
        else:
            torch.addmm(bias, rows_of(x), self.weight.t(), out=y)

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Add `dy @ W`, accumulated into the last entry by the matrix product if there is one."""
        if products:
            products[0].addmm_(rows_of(dy), self.weight)
        else:
            products.append(rows_of(dy) @ self.weight)


@dataclass(frozen=True)
class PackedWeight:
    """A quantized (e.g. 4-bit) weight that is dequantized for each product.

    outputs: N.
    restore: returns the dequantized weight [N, K] in the dtype of the input.
    """

    outputs: int
    restore: Callable[[], Tensor]

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`."""
        ExactWeight(self.restore()).multiply(x, bias, y)

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Add `dy @ W`."""
        ExactWeight(self.restore()).add_input_gradient(dy, products)


@dataclass(frozen=True)
class Float8Weight:
    """values: [N, K], float8_e4m3fn; inverse: [1], fp32, the inverse of their scale; as in `float8_stored_linear`."""

    values: Tensor
    inverse: Tensor

    @property
    def outputs(self) -> int:
        """N."""
        return self.values.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`, in FP8. Weights that multiply the same x share its cast."""
        inputs = cast_input(x, "tensorwise", False)
        product(inputs.rows, self.values, inputs.row_inverse, self.inverse, y.dtype, fast=True, out=y)
        if bias is not None:
            y.add_(bias.to(y.dtype))

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Append `dy @ W`, in FP8 with dy in E5M2: PyTorch's FP8 product cannot accumulate."""
        d = cast(rows_of(dy), "tensorwise", rows=True, columns=False, e5m2=True, amax=largest_of(dy))
        products.append(product(d.rows, transpose(self.values), d.row_inverse, self.inverse, dy.dtype))
