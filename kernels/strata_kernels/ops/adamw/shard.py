"""The position of a shard in its unsharded tensor, of which the random bits are a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Kernels compute 32-bit column indices, up to one chunk beyond the row.
_LONGEST_ROW = 2**31 - 2**20


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of a tensor on one rank.

    key: id of the tensor, equal on all ranks and in all runs, unique within the model.
    offset: row-major index of the shard's first element in the unsharded tensor.
    row: elements per row of the shard; 0 if its rows are complete.
    whole_row: elements per row of the unsharded tensor; 0 if the shard's rows are complete.

    Element i of the shard has index offset + i // row · whole_row + i % row, modulo 2^32: elements that far apart share
    random bits.
    """

    key: int
    offset: int = 0
    row: int = 0
    whole_row: int = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.key < 2**63 or self.offset < 0:
            raise ValueError(f"key must be a 64-bit integer and offset at least 0, got {self}")
        if not 0 <= self.row <= self.whole_row or (self.row == 0) != (self.whole_row == 0):
            raise ValueError(f"0 < row <= whole_row must hold, or both be 0, got {self}")
        if self.row != self.whole_row and self.row > _LONGEST_ROW:
            raise ValueError(f"a sharded row must have at most {_LONGEST_ROW} elements, got {self}")

    @classmethod
    def of(cls, key: int, shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int]) -> Shard:
        """The shard of a tensor of `shape` that starts at `offsets`, along the first axis and at most one other.

        For a DTensor, `torch.distributed.tensor._utils.compute_local_shape_and_global_offset` returns local_shape and
        offsets.

        Raises:
            ValueError: the tensor is sharded along two axes besides the first.

        Example:
            >>> Shard.of(7, (8, 6), (4, 3), (4, 3))
            Shard(key=7, offset=27, row=3, whole_row=6)
        """
        if not len(shape) == len(local_shape) == len(offsets):
            raise ValueError(f"shape, local_shape and offsets must be of one length: {shape}, {local_shape}, {offsets}")
        offset = sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(offsets))
        sharded = [axis for axis in range(1, len(shape)) if local_shape[axis] != shape[axis]]
        if len(sharded) > 1:
            raise ValueError(f"a tensor may be sharded along axis 0 and one other, got {local_shape} of {shape}")
        if not sharded or 0 in local_shape:
            return cls(key, offset)
        return cls(key, offset, math.prod(local_shape[sharded[0] :]), math.prod(shape[sharded[0] :]))

    def place(self) -> tuple[int, int, int]:
        """(offset, row, whole_row); the last two are 1 for complete rows."""
        return self.offset, self.row or 1, self.whole_row or 1
