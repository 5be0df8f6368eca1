"""What processes that compute the same rows together say to each other inside of a model, as autograd functions.

All are plain tensors before and after: nothing is still under way, and nothing of a subclass goes through the model.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """The processes that have the parts, and which of them this one is."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """Those of the one dimension of `mesh`."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def all_reduce(self, x: Tensor) -> Tensor:
        """What the processes have, added up; `x` stays as it is."""
        return _done(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...] → [size N, ...], what all processes have."""
        return _done(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), self.size, self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size N, ...] → [N, ...], this process's part of the sum."""
        return _done(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name))

    def gather_columns(self, x: Tensor) -> Tensor:
        """[..., D / size] → [..., D], the columns of all processes."""
        return torch.cat(self.all_gather(x).chunk(self.size), dim=-1)

    def local_columns(self, x: Tensor) -> Tensor:
        """[..., D] → [..., D / size], this process's columns."""
        return x.chunk(self.size, dim=-1)[self.rank].contiguous()


def _done(message: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(message)
    return done


class CopyToGroup(torch.autograd.Function):
    """What every process has whole goes where each computes with a part: its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """`x`."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum."""
        return ctx.group.all_reduce(gradient), None


class ReduceFromGroup(torch.autograd.Function):
    """What each process has computed with its part is added up, for all of them; each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """The sum."""
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        return gradient, None


class GatherFromGroup(torch.autograd.Function):
    """Columns of each process become those of all; every process goes on with them in the same way."""

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
    """Of columns that every process has, each goes on with its own."""

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
    """What the processes have, one behind the other; each goes on with its own part of the gradients' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """[N, ...] → [size N, ...]."""
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[size N, ...] → [N, ...]."""
        return ctx.group.reduce_scatter(gradient), None
