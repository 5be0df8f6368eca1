"""Linear layers of which each process of a group has a part.

Weights are DTensors, so that FSDP and checkpoints know the whole; what a layer computes is plain tensors of this
process's part. Under PyTorch's own styles of tensor parallelism every operator goes through DTensor, and at a few
thousand tokens the host falls behind an H200.
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
    """A linear layer that was cut, in place of the whole one."""

    # How its weight is cut, and its bias.
    placements: tuple[Placement, Placement]
    group: Group

    def part(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as this process has them; their gradients are parts of the whole ones."""
        weight, bias = self.weight, self.bias
        assert isinstance(weight, DTensor) and (bias is None or isinstance(bias, DTensor))
        return weight.to_local(), None if bias is None else bias.to_local()


class ColumnParallelLinear(ParallelLinear):
    """Each process has some of the columns of the result."""

    placements = (Shard(0), Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H / size]."""
        return functional.linear(x, *self.part())


class GatheredColumnParallelLinear(ColumnParallelLinear):
    """Each process computes some of the columns, and has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H]."""
        whole: Tensor = GatherFromGroup.apply(super().forward(x), self.group)
        return whole


_ROWS = (Shard(1), Replicate())


def _summed(layer: ParallelLinear, multiply: Callable[..., Tensor]) -> Tensor:
    """What `multiply` makes of the parts of the weight, added up; and the bias once, not by every process."""
    weight, bias = layer.part()
    y: Tensor = ReduceFromGroup.apply(multiply(weight=weight), layer.group)
    return y if bias is None else y + bias


class RowParallelLinear(ParallelLinear):
    """Each process has some of the columns of the input; all have the whole result."""

    placements = _ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D / size] → [..., H]."""
        return _summed(self, partial(functional.linear, x))

    def project_activation(self, activate: Callable[..., Tensor]) -> Tensor:
        """`self(activate())`, for an activation that takes the projection's weight along; as the kernel layer asks."""
        return _summed(self, activate)


class SplitRowParallelLinear(ParallelLinear):
    """The same where every process has all columns of the input."""

    placements = _ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] → [..., H]."""
        return _summed(self, partial(functional.linear, ScatterToGroup.apply(x, self.group)))


def make_parallel(linear: nn.Linear, kind: type[ParallelLinear], mesh: DeviceMesh) -> None:
    """Make `linear`, which has no memory, a layer of which each process of the one dimension of `mesh` has a part.

    Its class changes, nothing else does: names, hooks and the state dict stay as they are.

    Raises ValueError when the parts would not be equal.
    """
    assert type(linear) is nn.Linear, type(linear)
    cut = kind.placements[0]
    assert isinstance(cut, Shard)
    if linear.weight.shape[cut.dim] % mesh.size():
        raise ValueError(
            f"parallel.tensor_parallel {mesh.size()} does not divide dimension {cut.dim} of a projection's weight, "
            f"{list(linear.weight.shape)}; set it to a number that does"
        )
    linear.__class__ = kind
    linear.group = Group.of(mesh)  # type: ignore[assignment]
    shard_parameters(linear, mesh, kind.placements)


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Make the parameters of `module`, which have no memory, DTensors, each cut as said; not those that are cut."""
    for (name, parameter), cut in zip(module.named_parameters(recurse=False), placements, strict=False):
        if not isinstance(parameter, DTensor):
            # None: every process cuts its part out of what it has, which is nothing but shapes.
            part = distribute_tensor(parameter, mesh, [cut], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
