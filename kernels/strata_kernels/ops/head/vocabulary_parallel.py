"""Vocabulary-parallel heads: each rank of a group holds a shard of the vocabulary.

Each rank computes the logits of its columns. The loss of a row depends on the other columns only through `Statistics`:
the ranks all-gather these and combine them in a fixed order, so that all get the same result. The gradient of x is
summed over the shards; the gradients of weight and bias are local.

A DTensor weight with placement Shard(0) is sharded in this way along its mesh dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cross_entropy.row_statistics import Columns, Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class VocabularyShard:
    """The shard of the vocabulary of this rank.

    Attributes:
        group: name of the process group over which the vocabulary is sharded; empty if it is not.
        ranks: size of the group.
        start: first class of this shard.
        total: classes of the whole vocabulary.
        sum_dx: whether to all-reduce the gradient of x over the group.
    """

    group: str
    ranks: int
    start: int
    total: int
    sum_dx: bool

    @property
    def widest(self) -> int:
        """Classes of the largest shard, by which all ranks plan chunks, so that they issue the same collectives."""
        return -(-self.total // self.ranks)

    def columns(self, offset: int) -> Columns:
        """Vocabulary columns starting at column `offset` of this shard."""
        return Columns(self.start + offset, self.total)

    def gather_statistics(self, parts: Sequence[Statistics]) -> Statistics:
        """Statistics over the whole vocabulary, from `parts` of this shard and those of other ranks. Collective."""
        packed = torch.stack([_pack(part) for part in parts])
        if self.group and not packed.is_meta:
            packed = _pack(_combine(packed, parts[0]))[None]
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, self.ranks, self.group)
            packed = torch.ops._c10d_functional.wait_tensor(gathered)
        return _combine(packed, parts[0])

    def sum_over_shards(self, parts: Tensor) -> Tensor:
        """The sum of `parts` over the ranks, in shard order: bitwise equal on all ranks. Collective."""
        if not self.group or parts.is_meta:
            return parts
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(parts[None], self.ranks, self.group)
        total: Tensor = torch.ops._c10d_functional.wait_tensor(gathered).sum(0)
        return total

    def start_all_reduce(self, dx: Tensor) -> list[Tensor]:
        """Start an all-reduce of dx over the group, in place; returns the argument of `wait_all`."""
        if not (self.group and self.sum_dx) or dx.is_meta:
            return []
        return [torch.ops._c10d_functional.all_reduce_(dx, "sum", self.group)]


def unsharded(vocabulary: int) -> VocabularyShard:
    """The shard for a vocabulary that is not sharded."""
    return VocabularyShard("", 1, 0, vocabulary, False)


def _shard_of_group(group: ProcessGroup, vocabulary: int) -> VocabularyShard:
    """The shard of this rank, if each rank of `group` holds `vocabulary` classes, in rank order."""
    ranks = group.size()
    return VocabularyShard(group.group_name, ranks, group.rank() * vocabulary, ranks * vocabulary, True)


def wait_all(pending: Sequence[Tensor]) -> None:
    """Make the current stream wait for the collectives of `VocabularyShard.start_all_reduce`."""
    for tensor in pending:
        torch.ops._c10d_functional.wait_tensor(tensor)


def _pack(found: Statistics) -> Tensor:
    """The fields as one tensor [fields, N], for one collective. Column indices are exact in fp32 up to 2^24."""
    dtype = found.largest.dtype
    return torch.stack([field.to(dtype) for field in found if field is not None])


def _combine(packed: Tensor, like: Statistics) -> Statistics:
    """Statistics over the union of the parts [parts, fields, N], with the fields of `like`."""
    largest, log_sum, linear, *rest = packed.unbind(1)
    fields = iter(rest)
    parts = Statistics(largest, log_sum, linear, *(None if value is None else next(fields) for value in like[3:]))
    return Statistics.combined(parts._replace(prediction=None if parts.prediction is None else parts.prediction.long()))


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without importing torch.distributed."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def rows_of_shard(head: Any, shard: VocabularyShard, weight: Any) -> Tensor:
    """The rows of another head's weight [V', ...] or bias, V' <= V, for the classes that this rank has of `weight`.

    A collective if `head` is a DTensor with placements other than those of `weight`.

    Raises:
        ValueError: a rank would have none of the V' classes.
    """
    found: Tensor = head
    if is_dtensor(weight):
        if is_dtensor(head) and head.shape[0] == shard.total and head.placements == weight.placements:
            found = head.to_local()
            return found
        head = head.full_tensor() if is_dtensor(head) else head
        last = -(-shard.total // shard.ranks) * (shard.ranks - 1)
        if head.shape[0] <= last:
            raise ValueError(
                f"the last of {shard.ranks} shards of {shard.total} classes begins at class {last}, but the teacher "
                f"has {head.shape[0]}: shard the head over fewer processes"
            )
        found = head[shard.start : shard.start + weight.to_local().shape[0]]
    return found


@dataclass(frozen=True)
class LocalTensors:
    """The local tensors of this rank, its vocabulary shard, and the conversion of results to DTensors.

    beside: another tensor of the rows: row weights, or a teacher's hidden states.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    beside: Tensor | None
    shard: VocabularyShard
    sum_over_row_shards: Callable[[Tensor], Tensor]
    to_dtensor: Callable[[Tensor], Tensor]


def local_tensors(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, beside: Tensor | None,
    group: ProcessGroup | None,
) -> LocalTensors:  # fmt: skip
    """The local tensors of this rank: local shards of DTensors, or the plain tensors.

    Raises:
        ValueError: a group is given with DTensors, or as in `_local_of_dtensors`.
    """
    if is_dtensor(x) or is_dtensor(weight) or is_dtensor(bias):
        if group is not None:
            raise ValueError("group is for plain tensors; DTensors are sharded by their placements")
        return _local_of_dtensors(x, weight, target, bias, beside)
    shard = unsharded(weight.shape[0])
    if group is not None and group.size() > 1:
        shard = _shard_of_group(group, weight.shape[0])
    return LocalTensors(x, weight, target, bias, beside, shard, _identity, _identity)


def _identity(x: Tensor) -> Tensor:
    return x


def _local_of_dtensors(x: Any, weight: Any, target: Any, bias: Any, beside: Any) -> LocalTensors:
    """The local tensors of DTensors, so that a loss behaves like a DTensor operator.

    x is replicated along the mesh dimension along which weight is Shard(0) (tensor parallelism); its rows may be
    sharded along the others (data parallelism). DTensor communicates, also x's gradient: for a sequence-parallel x by
    reduce-scatter, not all-reduce.

    target and `beside` may be plain tensors if the rows of x are not sharded.

    Raises:
        ValueError: x, weight and bias are not all DTensors of one mesh, or a placement is not supported.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(x, DTensor) or not isinstance(weight, DTensor) or x.device_mesh != weight.device_mesh:
        raise ValueError(_MIXED.format(x=_describe_placement(x), weight=_describe_placement(weight)))
    mesh = weight.device_mesh
    axis = _vocabulary_axis(weight)
    kept = [
        p if i != axis and p.is_shard() and not p.is_shard(x.dim() - 1) else Replicate()
        for i, p in enumerate(x.placements)
    ]
    row_sharded = [p.is_shard() for p in kept]
    summed = [Partial() if is_sharded else Replicate() for is_sharded in row_sharded]
    d_head = [Partial() if is_sharded else p for is_sharded, p in zip(row_sharded, weight.placements, strict=True)]
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.device_mesh != mesh:
            raise ValueError(f"bias must be a DTensor on the mesh of weight, not {_describe_placement(bias)}")
        bias = bias.redistribute(placements=weight.placements).to_local(grad_placements=d_head)
    shape = x.shape[:-1]
    d_x = [Partial() if i == axis else p for i, p in enumerate(kept)]
    local = x.redistribute(placements=kept).to_local(grad_placements=d_x)

    def local_rows(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.redistribute(placements=kept).to_local()
        if value is not None and any(row_sharded):
            raise ValueError(
                f"the rows of x are sharded, {x.placements}: target, row_weight and teacher_x must be DTensors, too"
            )
        return value

    def sum_over_row_shards(value: Tensor) -> Tensor:
        return value if not any(row_sharded) else DTensor.from_local(value, mesh, summed, run_check=False).full_tensor()

    def to_dtensor(loss: Tensor) -> Tensor:
        if loss.dim() == 0:
            whole = DTensor.from_local(loss, mesh, summed, run_check=False)
            return whole.redistribute(placements=[Replicate()] * mesh.ndim)
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(loss, mesh, kept, run_check=False, shape=torch.Size(shape), stride=strides)

    return LocalTensors(
        local, weight.to_local(grad_placements=d_head), local_rows(target), bias, local_rows(beside),
        _shard_of_dtensor(weight, axis), sum_over_row_shards, to_dtensor,
    )  # fmt: skip


def _vocabulary_axis(weight: DTensor) -> int | None:
    """The mesh dimension over which the vocabulary is sharded; None if it is replicated."""
    from torch.distributed.tensor import Shard

    axes = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(axes) > 1 or any(weight.placements[i] != Shard(0) for i in axes):
        raise ValueError(
            f"weight has placements {weight.placements}; redistribute it to Replicate(), with Shard(0) along at most "
            "one dimension of the mesh"
        )
    return axes[0] if axes else None


def _shard_of_dtensor(weight: DTensor, axis: int | None) -> VocabularyShard:
    total = weight.shape[0]
    mesh = weight.device_mesh
    ranks = 1 if axis is None else mesh.size(axis)
    if axis is None or ranks == 1:
        return unsharded(total)
    # As in Shard(0): equal shards, of which the last may be smaller.
    size = -(-total // ranks)
    if size * (ranks - 1) >= total:
        raise ValueError(f"weight has {total} classes for {ranks} processes, of which the last would have none")
    start = mesh.get_local_rank(axis) * size
    return VocabularyShard(mesh.get_group(axis).group_name, ranks, start, total, False)


def _describe_placement(x: Any) -> str:
    return f"a DTensor of {x.placements} on {x.device_mesh}" if is_dtensor(x) else "a plain tensor"


_MIXED = (
    "x is {x} and weight is {weight}: make them DTensors of one mesh, for example by "
    "DTensor.from_local(x, weight.device_mesh, [Replicate()]) if all ranks have the same x. A weight that FSDP "
    "has sharded is whole only inside its module's forward: leave the output head in the root's group of fully_shard, "
    "or call unshard() on its module first"
)
