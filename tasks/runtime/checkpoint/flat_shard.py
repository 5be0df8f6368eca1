"""Shard of a flattened tensor: the consecutive elements that ZeRO leaves on one rank.

Distributed checkpointing saves rectangular chunks, with an offset and a size in every dimension. A `FlatShard` maps its
elements to such chunks and returns each as a view, so that they are written and read in place without communication.
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

_GET_SHARD = "_strata_get_shard"


def chunks(shape: tuple[int, ...], begin: int, end: int) -> list[Chunk]:
    """Rectangular chunks that cover the elements `begin` to `end` of a row-major tensor, in the same order.

    >>> chunks((4, 3), 2, 11)
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


def _in_row(row: int, inner: list[Chunk]) -> list[Chunk]:
    return [((row, *offset), (1, *size)) for offset, size in inner]


class FlatShard(Tensor):
    """A tensor of shape `shape` of which this rank has only `flat`: the elements from index `start` on, row-major.

    Distributed checkpointing handles it like a DTensor. All other operators raise TypeError: it has a shape and a dtype
    but not all values.
    """

    start: int
    flat: Tensor
    """[n], n >= 0: the elements of this rank, in the memory that training uses."""

    def __new__(cls, shape: torch.Size, start: int, flat: Tensor) -> FlatShard:
        """Keeps a reference to `flat`, no copy."""
        self: FlatShard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        self.start, self.flat = start, flat
        self._chunks, taken = {}, 0
        for offset, size in chunks(tuple(shape), start, start + flat.numel()):
            self._chunks[torch.Size(offset)] = (taken, torch.Size(size))
            taken += math.prod(size)
        return self

    _chunks: dict[torch.Size, tuple[int, torch.Size]]
    """By the chunk's offset: where the chunk begins in `flat`, and its size."""

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
        return f"FlatShard({self.flat.numel()} elements of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{function} needs values that are on other ranks")


def register_flat_shard(parameter: nn.Parameter, get_shard: Callable[[], FlatShard]) -> None:
    """Have `shard_of(parameter)` return `get_shard()`, for a parameter without storage of its own."""
    setattr(parameter, _GET_SHARD, get_shard)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or buffer: a DTensor, a FlatShard, or the whole tensor if it is not sharded."""
    get_shard: Callable[[], FlatShard] | None = getattr(tensor, _GET_SHARD, None)
    return tensor.detach() if get_shard is None else get_shard()


def local_values(tensor: Tensor) -> Tensor:
    """The values of a parameter or buffer on this rank, as a plain tensor. PyTorch: `DTensor.to_local`."""
    shard = shard_of(tensor)
    if isinstance(shard, FlatShard):
        return shard.flat
    return shard.to_local() if isinstance(shard, DTensor) else shard
