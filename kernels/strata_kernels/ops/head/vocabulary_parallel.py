"""Vocabulary-parallel heads: each process of a group holds a shard of the vocabulary.

Each process computes the logits of its own columns. The loss of a row needs all of them, but only through the few
numbers of `Statistics`: the processes all-gather these in a fixed order, and each combines them to the same result. The
gradient of x is a sum over the shards; the gradients of weight and bias stay with their shard.

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
    """The classes that this process holds.

    Attributes:
        group: name of the process group that holds the vocabulary; empty if this process holds all of it.
        ranks: processes in the group.
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
        """Classes of the largest shard: all processes plan their chunks by it, so that their collectives match."""
        return -(-self.total // self.ranks)

    def columns(self, offset: int) -> Columns:
        """The columns of the vocabulary from column `offset` of this shard on."""
        return Columns(self.start + offset, self.total)

    def gather_statistics(self, parts: Sequence[Statistics]) -> Statistics:
        """Statistics over the whole vocabulary, from those over the parts of this shard and of the other processes'."""
        packed = torch.stack([_pack(part) for part in parts])
        if self.group and not packed.is_meta:
            packed = _pack(_combine(packed, parts[0]))[None]
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, self.ranks, self.group)
            packed = torch.ops._c10d_functional.wait_tensor(gathered)
        return _combine(packed, parts[0])

    def sum_over_shards(self, parts: Tensor) -> Tensor:
        """The sum of `parts` over the processes, added in the order of the shards: equal bits on each of them."""
        if not self.group or parts.is_meta:
            return parts
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(parts[None], self.ranks, self.group)
        total: Tensor = torch.ops._c10d_functional.wait_tensor(gathered).sum(0)
        return total

    def start_all_reduce(self, dx: Tensor) -> list[Tensor]:
        """Start to sum dx over the group, in place; returns what `wait_all` waits for."""
        if not (self.group and self.sum_dx) or dx.is_meta:
            return []
        return [torch.ops._c10d_functional.all_reduce_(dx, "sum", self.group)]


def unsharded(vocabulary: int) -> VocabularyShard:
    """The shard of a process that holds the whole vocabulary."""
    return VocabularyShard("", 1, 0, vocabulary, False)


def _shard_of_group(group: ProcessGroup, vocabulary: int) -> VocabularyShard:
    """The shard of this process if every process of `group` holds `vocabulary` classes, in the order of their ranks."""
    ranks = group.size()
    return VocabularyShard(group.group_name, ranks, group.rank() * vocabulary, ranks * vocabulary, True)


def wait_all(pending: Sequence[Tensor]) -> None:
    """Let the current stream wait for the collectives that `VocabularyShard.start_all_reduce` started."""
    for tensor in pending:
        torch.ops._c10d_functional.wait_tensor(tensor)


def _pack(found: Statistics) -> Tensor:
    """The fields as one tensor [fields, N], for one collective. fp32 holds column numbers up to 2^24 exactly."""
    dtype = found.largest.dtype
    return torch.stack([field.to(dtype) for field in found if field is not None])


def _combine(packed: Tensor, like: Statistics) -> Statistics:
    """Statistics over the union of the parts [parts, fields, N], which have the fields of `like`."""
    largest, log_sum, linear, *rest = packed.unbind(1)
    fields = iter(rest)
    parts = Statistics(largest, log_sum, linear, *(None if value is None else next(fields) for value in like[3:]))
    return Statistics.combined(parts._replace(prediction=None if parts.prediction is None else parts.prediction.long()))


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without importing torch.distributed."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def rows_of_shard(head: Any, shard: VocabularyShard, weight: Any) -> Tensor:
    """Of another head's weight [V', ...] or bias, the classes that this process has of `weight`, of which V' are some.

    A collective if `head` is a DTensor that is not sharded as `weight` is.

    Raises:
        ValueError: a process would have none.
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
    """The tensors of this process, its shard of the vocabulary, and how results become DTensors again.

    `beside` is what each row has beside x: its weight, or a teacher's hidden states.
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
    """The tensors that this process computes with: its shards of DTensors, or plain tensors as they are.

    Raises:
        ValueError: a group is given with DTensors, or as `_local_of_dtensors` says.
    """
    if is_dtensor(x) or is_dtensor(weight) or is_dtensor(bias):
        if group is not None:
            raise ValueError("group is for plain tensors; a DTensor's placements say which processes hold what")
        return _local_of_dtensors(x, weight, target, bias, beside)
    shard = unsharded(weight.shape[0])
    if group is not None and group.size() > 1:
        shard = _shard_of_group(group, weight.shape[0])
    return LocalTensors(x, weight, target, bias, beside, shard, _identity, _identity)


def _identity(x: Tensor) -> Tensor:
    return x


def _local_of_dtensors(x: Any, weight: Any, target: Any, bias: Any, beside: Any) -> LocalTensors:
    """The local tensors to compute with, so that a loss behaves like an operator of DTensor.

    Along the mesh dimension that shards weight by Shard(0), x is replicated, as in tensor parallelism. Along the others
    its rows may be sharded, as in data parallelism. DTensor does the communication, of x's gradient too: a
    sequence-parallel x gets a reduce-scatter, not an all-reduce.

    target and what is beside may be plain tensors if the rows of x are not sharded.

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
            raise ValueError(f"bias must be a DTensor of the mesh of weight, not {_describe_placement(bias)}")
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
    """The mesh dimension that shards the vocabulary; None if every process holds all of it."""
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
    # As Shard(0) does: shards of one size, of which the last may be smaller.
    size = -(-total // ranks)
    if size * (ranks - 1) >= total:
        raise ValueError(f"weight has {total} classes for {ranks} processes, of which the last would have none")
    start = mesh.get_local_rank(axis) * size
    return VocabularyShard(mesh.get_group(axis).group_name, ranks, start, total, False)


def _describe_placement(x: Any) -> str:
    return f"a DTensor of {x.placements} on {x.device_mesh}" if is_dtensor(x) else "a plain tensor"


_MIXED = (
    "x is {x} and weight is {weight}: make them DTensors of one mesh, for example by "
    "DTensor.from_local(x, weight.device_mesh, [Replicate()]) where every process has the same x. A weight that FSDP "
    "has sharded is whole only inside its module's forward: leave the output head in the root's group of fully_shard, "
    "or call unshard() on its module first"
)
