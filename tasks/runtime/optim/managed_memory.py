"""Memory of a GPU that gives way: CUDA's managed memory, as tensors.

Where the GPU's memory lacks, the driver moves pages of it to the host's, and back when a kernel reads or writes them.
PyTorch's allocator knows nothing of it and does not count it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Bytes of the smallest tensor that is worth it: managed memory is handed out and moved in large pages."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros(shape, dtype=dtype, device=device)`, in managed memory of a GPU; it is freed with its last view.

    On the CPU, and below `SMALLEST` bytes, in ordinary memory. Raises ValueError where the GPU has no managed memory,
    torch.OutOfMemoryError where there is not enough.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cuda" or size < SMALLEST:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = _Managed(size, device)
    flat = torch.as_tensor(memory, device=device)
    # A copy would be in ordinary memory.
    assert flat.data_ptr() == memory.pointer, (flat.device, device)
    return flat.view(dtype).view(shape).zero_()


class _Managed:
    """Bytes of managed memory, which last as long as this object does: tensors that are made of it keep it."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        with torch.cuda.device(device):
            # The package has a runtime of its own, to which the device is told likewise: the memory is that one's.
            runtime.cudaSetDevice(torch.cuda.current_device())
            error, pointer = runtime.cudaMallocManaged(size, runtime.cudaMemAttachGlobal)
        if error == runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise torch.OutOfMemoryError(
                f"optimizer.paged: neither {device} nor the host has {size / 2**20:,.1f} MiB more of managed memory; "
                "free memory of the host, or set optimizer.paged to false"
            )
        if error != runtime.cudaError_t.cudaSuccess:
            raise ValueError(
                f"optimizer.paged: {device} gives no managed memory, {size / 2**20:,.1f} MiB ({error.name}); set "
                "optimizer.paged to false"
            )
        self.pointer = int(pointer)
        # When the process ends, the driver takes back what is left.
        weakref.finalize(self, _free, self.pointer, device).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.pointer, False),
        }


def _free(pointer: int, device: torch.device) -> None:
    """Waits for what the GPU does with it."""
    from cuda.bindings import runtime

    # Whatever thread this is: without a device of its own it would begin a context on the first GPU.
    with torch.cuda.device(device):
        runtime.cudaSetDevice(torch.cuda.current_device())
        runtime.cudaFree(pointer)
