"""Storage of a checkpoint's tensors: safetensors files and a JSON index of the chunks in them.

PyTorch's distributed checkpointing (DCP) plans which rank writes which chunk and which chunks a rank has to read. Its
own storages are not used: one keeps a pickle, which can run any code, and the one for safetensors loads corrupt and
incomplete checkpoints without an error (docs/decisions/checkpoint-storage.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = "index.json"

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write contiguous CPU tensors as a safetensors file; returns its size and SHA-256.

    The digest is computed from memory, not read back from disk. Nothing is copied, and the GIL is released while bytes
    are hashed and written.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Align the data to eight bytes.
    encoded += b" " * (-len(encoded) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        prefix = memoryview(len(encoded).to_bytes(8, "little") + encoded)
        for content in (prefix, *map(_bytes, tensors.values())):
            digest.update(content)
            size += _write(file, content)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes(tensor: Tensor) -> memoryview:
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _write(file: Any, content: memoryview) -> int:
    """Write all bytes: one call of write(2) takes at most 2 GiB."""
    written = 0
    while written < len(content):
        written += file.write(content[written:])
    return written


class Index:
    """Index of the chunks of a checkpoint's tensors; the JSON counterpart of DCP's `Metadata`."""

    def __init__(self, folder: Path) -> None:
        """Read the index of a complete checkpoint. Raises ValueError when it names a file outside its folder."""
        self._folder = folder
        self._tensors: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = {part["file"] for tensor in self._tensors.values() for part in tensor["parts"].values()}
        outside = sorted(file for file in files if Path(file).name != file)
        if outside:
            raise ValueError(
                f"{folder / INDEX} names {outside[0]!r}, which is not a file of the checkpoint; delete {folder}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def empty(self, name: str) -> Tensor:
        """An uninitialized CPU tensor with the shape and dtype of `name`."""
        return torch.empty(self._tensors[name]["shape"], dtype=_BY_NAME[self._tensors[name]["dtype"]])

    def shape(self, name: str) -> torch.Size:
        """Shape of the unsharded tensor."""
        return torch.Size(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor."""
        return _BY_NAME[self._tensors[name]["dtype"]]

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Read the tensors, or this rank's shards of them, in place, however they were sharded when written.

        Raises ValueError when a tensor is not in the checkpoint or has another shape there.
        """
        self._require_same_shapes(tensors)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self._metadata(), is_coordinator=False)
        by_file = defaultdict(list)
        for item in planner.create_local_plan().items:
            name, offsets = item.storage_index.fqn, item.storage_index.offset
            assert offsets is not None
            by_file[self._tensors[name]["parts"][offset_key(offsets)]["file"]].append(item)
        for file, items in by_file.items():
            with safe_open(str(self._folder / file), framework="pt") as opened:
                for item in items:
                    key = part_key(item.storage_index)
                    region = tuple(
                        slice(begin, begin + length)
                        for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    values = opened.get_slice(key)[region] if region else opened.get_tensor(key)
                    planner.resolve_tensor(item).detach().copy_(values)

    def _require_same_shapes(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self:
                raise ValueError(f"{self._folder} has no tensor {name!r}: it was saved from another model")
            if self.shape(name) != tensor.shape:
                raise ValueError(
                    f"{self._folder}: {name!r} has the shape {tuple(self.shape(name))}, not {tuple(tensor.shape)}: "
                    "it was saved from another model"
                )

    def _metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=_BY_NAME[tensor["dtype"]]),
                    torch.Size(tensor["shape"]),
                    [
                        ChunkStorageMetadata(_offsets(key), torch.Size(part["shape"]))
                        for key, part in tensor["parts"].items()
                    ],
                )
                for name, tensor in self._tensors.items()
            }
        )


def index_entry(size: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
    """A tensor's entry in the index, still without its chunks."""
    return {"shape": list(size), "dtype": _DTYPES[dtype], "parts": {}}


def offset_key(offsets: torch.Size) -> str:
    """Key of a chunk in the index: its offset in each dimension, joined by commas."""
    return ",".join(map(str, offsets))


def part_key(index: MetadataIndex) -> str:
    """Name of a chunk in its safetensors file."""
    assert index.offset is not None
    return f"{index.fqn}@{offset_key(index.offset)}"


def _offsets(key: str) -> torch.Size:
    return torch.Size([int(offset) for offset in key.split(",")] if key else [])
