"""Tensors in CUDA's managed memory.

When GPU memory runs out, the driver moves pages of managed memory to the host, and back when a kernel accesses them.
PyTorch's allocator does not know this memory and does not count it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Bytes of the smallest tensor in managed memory, which is allocated and moved in large pages."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros(shape, dtype=dtype, device=device)` in managed memory, which is freed with the last view.

    On the CPU, and below `SMALLEST` bytes, the tensor is in ordinary memory.

    Raises:
        ValueError: the GPU does not support managed memory.
        torch.OutOfMemoryError: GPU and host memory are exhausted.
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
    """An allocation of managed memory, freed with this object. Tensors made from it keep it alive."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import runtime

        with torch.cuda.device(device):
            # cuda.bindings has its own CUDA runtime, which allocates on the device that it has selected.
            runtime.cudaSetDevice(torch.cuda.current_device())
            error, pointer = runtime.cudaMallocManaged(size, runtime.cudaMemAttachGlobal)
        if error == runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise torch.OutOfMemoryError(
                f"optimizer.paged: neither {device} nor the host has {size / 2**20:,.1f} MiB more of managed memory; "
                "free memory of the host, or set optimizer.paged to false"
            )
        if error != runtime.cudaError_t.cudaSuccess:
            raise ValueError(
                f"optimizer.paged: {device} cannot allocate {size / 2**20:,.1f} MiB of managed memory ({error.name}); "
                "set optimizer.paged to false"
            )
        self.pointer = int(pointer)
        # At the end of the process the driver frees the memory.
        weakref.finalize(self, _free, self.pointer, device).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.pointer, False),
        }


def _free(pointer: int, device: torch.device) -> None:
    """Free the memory, after the GPU has finished its work on it."""
    from cuda.bindings import runtime

    # This may be any thread. A thread without a selected device would create a context on the first GPU.
    with torch.cuda.device(device):
        runtime.cudaSetDevice(torch.cuda.current_device())
        runtime.cudaFree(pointer)
