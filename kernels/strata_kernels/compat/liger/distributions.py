"""Liger's softmax and sparsemax: autograd functions, modules and functional forms."""

from __future__ import annotations

from torch import Tensor, nn

from ...ops.softmax import softmax
from ...ops.sparsemax import sparsemax


class LigerSoftmaxFunction:
    """`softmax`."""

    @staticmethod
    def apply(input_: Tensor) -> Tensor:
        """[..., V] → [..., V]."""
        return softmax(input_)


class LigerSparsemaxFunction:
    """`sparsemax`."""

    @staticmethod
    def apply(x: Tensor, dim: int) -> Tensor:
        """x: any shape; dim: axis of the distributions → the shape of x."""
        return sparsemax(x.transpose(dim, -1)).transpose(dim, -1)


class LigerSoftmax(nn.Module):
    """`softmax` over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., V] → [..., V]."""
        return softmax(x)


class LigerSparsemax(nn.Module):
    """`sparsemax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The shape of x."""
        return LigerSparsemaxFunction.apply(x, self.dim)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """`sparsemax`, over the axis `dim`."""
    return LigerSparsemaxFunction.apply(input, dim)


def liger_softmax(x: Tensor) -> Tensor:
    """`softmax` over the last axis."""
    return softmax(x)
