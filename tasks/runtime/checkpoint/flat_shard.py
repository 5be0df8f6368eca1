"""A tensor of which a process has some consecutive elements: what a strategy that splits flat memory leaves of it.

Distributed checkpointing deals in boxes: parts with an offset and a size in every dimension. A fragment says which
boxes its elements are, and hands out the memory of each: it is written and read in place, without its peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in every dimension."""

_GET_SHARD = "_strata_part"


def chunks(shape: tuple[int, ...], begin: int, end: int) -> list[Chunk]:
    """The elements `begin` to `end` of a tensor, counted row by row, as boxes in the same order.

    >>> boxes((4, 3), 2, 11)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if begin == end:
        return []
    if not shape:
        return [((), ())]
    inner = shape[1:]
    width = math.prod(inner)
    first, last = -(-begin // width), end // width
    if last < first:
        return _in_row(last, chunks(inner, begin - last * width, end - last * width))
    whole: list[Chunk] = [((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    head = chunks(inner, begin - (first - 1) * width, width)
    tail = chunks(inner, 0, end - last * width)
    return [*_in_row(first - 1, head), *whole, *_in_row(last, tail)]


def _in_row(row: int, found: list[Chunk]) -> list[Chunk]:
    return [((row, *offset), (1, *size)) for offset, size in found]


class FlatShard(Tensor):
    """A tensor of shape `shape`, of which only the elements from number `start` on are there, in the memory of `flat`.

    To distributed checkpointing it is like a DTensor; to all else it has a shape and a dtype, and no values.
    """

    start: int
    flat: Tensor
    """[elements here], possibly none: this process's part, which training reads and writes."""

    def __new__(cls, shape: torch.Size, start: int, flat: Tensor) -> FlatShard:
        """Takes no copy of `flat`."""
        self: FlatShard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        self.start, self.flat = start, flat
        self._chunks, taken = {}, 0
        for offset, size in chunks(tuple(shape), start, start + flat.numel()):
            self._chunks[torch.Size(offset)] = (taken, torch.Size(size))
            taken += math.prod(size)
        return self

    _chunks: dict[torch.Size, tuple[int, torch.Size]]
    """By offset: where a box begins in `flat`, and its size."""

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, size) for offset, (_, size) in self._chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        begin, size = self._chunks[index.offset]
        return self.flat.narrow(0, begin, size.numel()).view(size)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fragment({self.flat.numel()} elements of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{function} needs values that are on other processes")


def register_flat_shard(parameter: nn.Parameter, part: Callable[[], FlatShard]) -> None:
    """From now on `part()` is what this process has of `parameter`, whose own values come and go."""
    setattr(parameter, _GET_SHARD, part)


def shard_of(tensor: Tensor) -> Tensor:
    """What this process has of a parameter or buffer: all of it, or a DTensor or Fragment with its part."""
    elsewhere: Callable[[], FlatShard] | None = getattr(tensor, _GET_SHARD, None)
    return tensor.detach() if elsewhere is None else elsewhere()


def local_values(tensor: Tensor) -> Tensor:
    """The values that this process has of a parameter or buffer."""
    part = shard_of(tensor)
    if isinstance(part, FlatShard):
        return part.flat
    return part.to_local() if isinstance(part, DTensor) else part
