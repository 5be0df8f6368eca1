"""Products with a weight that is never trained, and lies in memory in one of three forms.

Of its input such a product keeps nothing: the gradient of the input needs the weight alone.
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
    """W: [N, K]."""

    @property
    def outputs(self) -> int:
        """N."""

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`. x: [..., K], y: [T, N]."""

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Add `dy @ W` to the sum of `products`: to one of them, or as another one. dy: [..., N], products: [T, K]."""


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
        """Add `dy @ W`: the product itself adds to one that is there."""
        if products:
            products[0].addmm_(rows_of(dy), self.weight)
        else:
            products.append(rows_of(dy) @ self.weight)


@dataclass(frozen=True)
class PackedWeight:
    """A weight that is restored for each product, as one of 4 bits.

    outputs: N.
    restore: returns [N, K] in the dtype of the input.
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
    """values: [N, K], float8_e4m3fn; inverse: [1], what undoes their scale. As of `float8_stored_linear`."""

    values: Tensor
    inverse: Tensor

    @property
    def outputs(self) -> int:
        """N."""
        return self.values.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """`y = x @ W.T + bias`, the product in FP8. Weights that multiply one x share its cast."""
        inputs = cast_input(x, "tensorwise", False)
        product(inputs.rows, self.values, inputs.row_inverse, self.inverse, y.dtype, fast=True, out=y)
        if bias is not None:
            y.add_(bias.to(y.dtype))

    def add_input_gradient(self, dy: Tensor, products: list[Tensor]) -> None:
        """Add `dy @ W`, in FP8, with the gradient in E5M2. PyTorch's product adds to nothing."""
        d = cast(rows_of(dy), "tensorwise", rows=True, columns=False, e5m2=True, amax=largest_of(dy))
        products.append(product(d.rows, transpose(self.values), d.row_inverse, self.inverse, dy.dtype))
