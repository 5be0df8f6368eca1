"""A vocabulary cut into parts, of one process or of several, for `linear_cross_entropy`.

Every part has its own columns of the logits. The loss of a row needs all of them, but only through a few numbers per
row and part (`Statistics`): these are gathered, in a fixed order, and every process computes the same whole from them.
The gradient of x is a sum over the parts; those of weight and bias stay with their part.

DTensors are cuts of this kind: a weight with placement Shard(0) is cut along its mesh dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cross_entropy.statistics import Shard as Columns
from ..cross_entropy.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """The part of the vocabulary that this process holds.

    Attributes:
        group: the name of the process group that holds the rest; empty for a process alone.
        ranks: processes in it.
        start: the first class of this part.
        total: classes in all.
        sum_dx: whether the gradient of x is summed over the group.
    """

    group: str
    ranks: int
    start: int
    total: int
    sum_dx: bool

    @property
    def widest(self) -> int:
        """Classes of the largest part: what all processes plan by, so that they exchange in step."""
        return -(-self.total // self.ranks)

    def part(self, offset: int) -> Columns:
        """The columns from `offset` of this process's part on."""
        return Columns(self.start + offset, self.total)

    def whole(self, parts: Sequence[Statistics]) -> Statistics:
        """The statistics of the whole vocabulary, from those of this process's parts and of the group's others."""
        packed = torch.stack([_pack(part) for part in parts])
        if self.group and not packed.is_meta:
            packed = _pack(_combine(packed))[None]
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, self.ranks, self.group)
            packed = torch.ops._c10d_functional.wait_tensor(gathered)
        return _combine(packed)

    def start_sum(self, dx: Tensor) -> list[Tensor]:
        """Begin to sum dx, in place, over the group; `finish_sum` waits for it."""
        if not (self.group and self.sum_dx) or dx.is_meta:
            return []
        return [torch.ops._c10d_functional.all_reduce_(dx, "sum", self.group)]


def alone(vocabulary: int) -> Cut:
    """The whole vocabulary in this process."""
    return Cut("", 1, 0, vocabulary, False)


def equal_cut(group: ProcessGroup, vocabulary: int) -> Cut:
    """This process's part where every process of `group` holds `vocabulary` classes, in the order of their ranks."""
    ranks = group.size()
    return Cut(group.group_name, ranks, group.rank() * vocabulary, ranks * vocabulary, True)


def finish_sum(pending: Sequence[Tensor]) -> None:
    """Wait, on the device, for what `Cut.start_sum` began."""
    for tensor in pending:
        torch.ops._c10d_functional.wait_tensor(tensor)


def _pack(found: Statistics) -> Tensor:
    """[4 or 5, N], in the order of the fields. fp32 holds the numbers of columns exactly up to 2^24."""
    dtype = found.largest.dtype
    return torch.stack([field.to(dtype) for field in found if field is not None])


def _combine(packed: Tensor) -> Statistics:
    """Statistics of the whole from those of its parts, [parts, fields, N]."""
    largest, log_sum, linear, share, *rest = packed.unbind(1)
    return Statistics.combined(Statistics(largest, log_sum, linear, share, rest[0].long() if rest else None))


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without importing what defines it."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


@dataclass(frozen=True)
class Localized:
    """The tensors of this process, its cut, and what makes the result a DTensor again."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    row_weight: Tensor | None
    cut: Cut
    sum_rows: Callable[[Tensor], Tensor]
    wrap: Callable[[Tensor], Tensor]


def localize(x: Any, weight: Any, target: Any, bias: Any, row_weight: Any) -> Localized:
    """What a process computes from its parts of DTensors: `linear_cross_entropy` as DTensor's own operators would.

    Along the mesh dimension that cuts weight by Shard(0), x is made whole, as in tensor parallelism; along the others
    it may be cut by rows, as in data parallelism. Communication is DTensor's, hence that of x's gradient, too: a
    sequence-parallel x gets a reduce-scatter, not an all-reduce.

    target and row_weight may be plain tensors where x is not cut by rows.

    Raises:
        ValueError: x, weight and bias are not all DTensors of one mesh, or a placement has no meaning here.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(x, DTensor) or not isinstance(weight, DTensor) or x.device_mesh != weight.device_mesh:
        raise ValueError(_MIXED.format(x=_place(x), weight=_place(weight)))
    mesh = weight.device_mesh
    axis = _vocabulary_axis(weight)
    kept = [
        p if i != axis and p.is_shard() and not p.is_shard(x.dim() - 1) else Replicate()
        for i, p in enumerate(x.placements)
    ]
    by_rows = [p.is_shard() for p in kept]
    summed = [Partial() if cut else Replicate() for cut in by_rows]
    d_head = [Partial() if cut else p for cut, p in zip(by_rows, weight.placements, strict=True)]
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.device_mesh != mesh:
            raise ValueError(f"bias must be a DTensor of the mesh of weight, not {_place(bias)}")
        bias = bias.redistribute(placements=weight.placements).to_local(grad_placements=d_head)
    shape = x.shape[:-1]
    d_x = [Partial() if i == axis else p for i, p in enumerate(kept)]
    local = x.redistribute(placements=kept).to_local(grad_placements=d_x)

    def of_rows(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.redistribute(placements=kept).to_local()
        if value is not None and any(by_rows):
            raise ValueError(f"x is cut by rows, {x.placements}: target and row_weight must be DTensors, too")
        return value

    def sum_rows(value: Tensor) -> Tensor:
        return value if not any(by_rows) else DTensor.from_local(value, mesh, summed, run_check=False).full_tensor()

    def wrap(loss: Tensor) -> Tensor:
        if loss.dim() == 0:
            whole = DTensor.from_local(loss, mesh, summed, run_check=False)
            return whole.redistribute(placements=[Replicate()] * mesh.ndim)
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(loss, mesh, kept, run_check=False, shape=torch.Size(shape), stride=strides)

    return Localized(
        local, weight.to_local(grad_placements=d_head), of_rows(target), bias, of_rows(row_weight),
        _cut_of(weight, axis), sum_rows, wrap,
    )  # fmt: skip


def _vocabulary_axis(weight: DTensor) -> int | None:
    """The mesh dimension that cuts the vocabulary; None where every process holds all of it."""
    from torch.distributed.tensor import Shard

    axes = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(axes) > 1 or any(weight.placements[i] != Shard(0) for i in axes):
        raise ValueError(
            f"weight has placements {weight.placements}; redistribute it to Replicate(), with Shard(0) along at most "
            "one dimension of the mesh"
        )
    return axes[0] if axes else None


def _cut_of(weight: DTensor, axis: int | None) -> Cut:
    total = weight.shape[0]
    mesh = weight.device_mesh
    ranks = 1 if axis is None else mesh.size(axis)
    if axis is None or ranks == 1:
        return alone(total)
    # As Shard cuts: parts of one size, of which the last may be smaller.
    size = -(-total // ranks)
    if size * (ranks - 1) >= total:
        raise ValueError(f"weight has {total} classes for {ranks} processes, of which the last would have none")
    start = mesh.get_local_rank(axis) * size
    return Cut(mesh.get_group(axis).group_name, ranks, start, total, False)


def _place(x: Any) -> str:
    return f"a DTensor of {x.placements} on {x.device_mesh}" if is_dtensor(x) else "a plain tensor"


_MIXED = (
    "x is {x} and weight is {weight}: make them DTensors of one mesh, for example by "
    "DTensor.from_local(x, weight.device_mesh, [Replicate()]) where every process has the same x. A weight that FSDP "
    "has sharded is whole only inside its module's forward: leave the output head in the root's group of fully_shard, "
    "or call unshard() on its module first"
)
