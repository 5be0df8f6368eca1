"""Collectives inside a model, as autograd functions, for tensor, context and expert parallelism.

Inputs and outputs are plain tensors: no DTensor and no unfinished collective reaches the model.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group of one mesh dimension, and this process's rank in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The group of a mesh with one dimension."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the group; does not change `x`."""
        return _done(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...] → [size N, ...], the inputs of all ranks in order."""
        return _done(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.size, self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size N, ...] → [N, ...], this rank's chunk of the sum."""
        return _done(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name))

    def sum_scatter(self, x: Tensor) -> Tensor:
        """`reduce_scatter`, rounded once: 16-bit inputs are summed in fp32, in the order of the ranks. Moves as many
        bytes.
        """
        sizes = [x.shape[0] // self.size] * self.size
        parts = _done(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), sizes, sizes, self.name))
        exact = torch.float32 if x.element_size() < 4 else x.dtype
        return parts.unflatten(0, (self.size, -1)).sum(0, dtype=exact).to(x.dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size, ...] → [size, ...]: entry i goes to rank i, and entry i of the result comes from it."""
        ones = [1] * self.size
        return _done(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), ones, ones, self.name))

    def gather_columns(self, x: Tensor) -> Tensor:
        """[..., D / size] → [..., D], the columns of all ranks."""
        return torch.cat(self.all_gather(x).chunk(self.size), dim=-1)

    def local_columns(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D / size], this rank's columns."""
        return x.chunk(self.size, dim=-1)[self.rank].contiguous()


def _done(message: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(message)
    return done


class CopyToGroup(torch.autograd.Function):
    """Identity, before a layer whose weight is sharded; the backward pass sums the gradients over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Returns `x`."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sums the gradient over the group."""
        return ctx.group.all_reduce(gradient), None


class ReduceFromGroup(torch.autograd.Function):
    """Sums partial results over the group; in the backward pass every rank keeps the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sums `x` over the group."""
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient unchanged."""
        return gradient, None


class GatherFromGroup(torch.autograd.Function):
    """Gathers columns; every rank must continue with them in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """[..., D / size] → [..., D]."""
        ctx.group = group
        return group.gather_columns(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[..., D] → [..., D / size]."""
        return ctx.group.local_columns(gradient), None


class ScatterToGroup(torch.autograd.Function):
    """Keeps this rank's columns of an input that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """[..., D] → [..., D / size]."""
        ctx.group = group
        return group.local_columns(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[..., D / size] → [..., D]."""
        return ctx.group.gather_columns(gradient), None


class AllGather(torch.autograd.Function):
    """Concatenates the inputs of all ranks; the backward pass sums the gradient and keeps this rank's chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """[N, ...] → [size N, ...]."""
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[size N, ...] → [N, ...]."""
        return ctx.group.reduce_scatter(gradient), None


class AllToAll(torch.autograd.Function):
    """Exchanges entries with all ranks; the backward pass sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """[size, ...] → [size, ...]."""
        ctx.group = group
        return group.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[size, ...] → [size, ...]."""
        return ctx.group.all_to_all(gradient), None
