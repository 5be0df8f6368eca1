"""Linear layers that are sharded over a tensor-parallel group.

Weights are DTensors, so that FSDP and checkpoints know the whole shape. A layer computes with plain tensors of its
local shard. With PyTorch's own tensor-parallel styles every operator goes through DTensor, and at a few thousand tokens
the host falls behind an H200.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from tasks.runtime.parallel.collectives import GatherFromGroup, Group, ReduceFromGroup, ScatterToGroup


class ParallelLinear(nn.Linear):
    """A linear layer with a sharded weight."""

    # Placement of the weight, and of the bias.
    placements: tuple[Placement, Placement]
    group: Group

    def local_shards(self) -> tuple[Tensor, Tensor | None]:
        """Local shards of weight and bias; their gradients are shards of the whole gradients."""
        weight, bias = self.weight, self.bias
        assert isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
        return weight.to_local(), None if bias is None else bias.to_local()


class ColumnParallelLinear(ParallelLinear):
    """Sharded by output features; the output stays sharded."""

    placements = (Shard(0), Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H / size]."""
        return functional.linear(x, *self.local_shards())


class GatheredColumnParallelLinear(ColumnParallelLinear):
    """Sharded by output features; every rank gathers the whole output."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H]."""
        whole: Tensor = GatherFromGroup.apply(super().forward(x), self.group)
        return whole


_ROWS = (Shard(1), Replicate())


def _sum_over_group(layer: ParallelLinear, multiply: Callable[..., Tensor]) -> Tensor:
    """Sum `multiply(weight=shard)` over the group and add the bias once."""
    weight, bias = layer.local_shards()
    y: Tensor = ReduceFromGroup.apply(multiply(weight=weight), layer.group)
    return y if bias is None else y + bias


class RowParallelLinear(ParallelLinear):
    """Sharded by input features; takes sharded input, and every rank gets the whole output."""

    placements = _ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D / size] → [..., H]."""
        return _sum_over_group(self, partial(functional.linear, x))

    def project_activation(self, activate: Callable[..., Tensor]) -> Tensor:
        """`self(activate())` for an activation that is fused with the weight of this projection, as the kernel layer
        calls it.
        """
        return _sum_over_group(self, activate)


class SplitRowParallelLinear(ParallelLinear):
    """Like `RowParallelLinear`, for an input that every rank has whole."""

    placements = _ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H]."""
        return _sum_over_group(self, partial(functional.linear, ScatterToGroup.apply(x, self.group)))


def make_parallel(linear: nn.Linear, kind: type[ParallelLinear], mesh: DeviceMesh) -> None:
    """Turn `linear`, whose weight is on the meta device, into a layer that is sharded over `mesh`. `mesh` has one
    dimension.

    Only its class changes: names, hooks and the state dict stay.

    Raises:
        ValueError: the size of `mesh` does not divide the sharded dimension.
    """
    assert type(linear) is nn.Linear, type(linear)
    placement = kind.placements[0]
    assert isinstance(placement, Shard)
    if linear.weight.shape[placement.dim] % mesh.size():
        raise ValueError(
            f"parallel.tensor_parallel {mesh.size()} does not divide dimension {placement.dim} of a projection's "
            f"weight, {list(linear.weight.shape)}; set it to a number that does"
        )
    linear.__class__ = kind
    linear.group = Group.of(mesh)  # type: ignore[assignment]
    shard_parameters(linear, mesh, kind.placements)


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Turn the meta parameters of `module` into DTensors with these placements; skip parameters that are DTensors
    already.
    """
    for (name, parameter), placement in zip(module.named_parameters(recurse=False), placements, strict=False):
        if not isinstance(parameter, DTensor):
            # With None, each rank shards its own copy, which has a shape and no values.
            part = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
