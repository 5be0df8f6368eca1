"""Tensors of a checkpoint on disk: safetensors files, and a JSON index that says which part of which tensor is where.

PyTorch's distributed checkpointing plans who writes which part and which parts a process needs to read; its own files
are left out, because their metadata is a pickle, and loading a pickle runs what its author likes.
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
    """Write tensors, contiguous and on the CPU, as a safetensors file; returns its size and SHA-256.

    The digest is of what was meant to be written, not of what the disk gives back. Nothing is copied, and other threads
    run while the bytes are hashed and written.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The data begin at a multiple of eight bytes.
    encoded += b" " * (-len(encoded) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        before = memoryview(len(encoded).to_bytes(8, "little") + encoded)
        for part in (before, *map(_bytes, tensors.values())):
            digest.update(part)
            size += _write(file, part)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes(tensor: Tensor) -> memoryview:
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _write(file: Any, part: memoryview) -> int:
    """One call writes two gigabytes at most."""
    done = 0
    while done < len(part):
        done += file.write(part[done:])
    return done


class Index:
    """Where the parts of a checkpoint's tensors are: what DCP calls its metadata, without a pickle."""

    def __init__(self, folder: Path) -> None:
        """Read the index of a whole checkpoint. Raises ValueError when it names a file outside of it."""
        self._folder = folder
        self._tensors: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = {part["file"] for tensor in self._tensors.values() for part in tensor["parts"].values()}
        outside = sorted(file for file in files if Path(file).name != file)
        if outside:
            raise ValueError(
                f"{folder / INDEX} names {outside[0]!r}, which is no file of the checkpoint; remove {folder}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def empty(self, name: str) -> Tensor:
        """A tensor on the CPU of the shape and dtype of `name`, its values to be read."""
        return torch.empty(self._tensors[name]["shape"], dtype=_BY_NAME[self._tensors[name]["dtype"]])

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self._tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Type of its elements."""
        return _BY_NAME[self._tensors[name]["dtype"]]

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors, or this process's parts of them, from whatever parts they were written in.

        Raises ValueError when one of them is not in the checkpoint or has another shape there.
        """
        self._require(tensors)
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
                    part = part_key(item.storage_index)
                    wanted = tuple(
                        slice(begin, begin + length)
                        for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    read = opened.get_slice(part)[wanted] if wanted else opened.get_tensor(part)
                    planner.resolve_tensor(item).detach().copy_(read)

    def _require(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self:
                raise ValueError(f"{self._folder} has no tensor {name!r}: it is of another model")
            if self.shape(name) != tensor.shape:
                raise ValueError(
                    f"{self._folder}: {name!r} has the shape {tuple(self.shape(name))}, not {tuple(tensor.shape)}: "
                    "it is of another model"
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
    """What the index says of a tensor; its parts are added under their keys."""
    return {"shape": list(size), "dtype": _DTYPES[dtype], "parts": {}}


def offset_key(offsets: torch.Size) -> str:
    """How a part is named: by where it begins in each dimension."""
    return ",".join(map(str, offsets))


def part_key(index: MetadataIndex) -> str:
    """The name of a part in its file."""
    assert index.offset is not None
    return f"{index.fqn}@{offset_key(index.offset)}"


def _offsets(key: str) -> torch.Size:
    return torch.Size([int(offset) for offset in key.split(",")] if key else [])
