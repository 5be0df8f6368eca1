"""Keep what recomputed layers keep in host memory between the passes (`training.activation_offloading`).

A recomputed layer keeps its input, and with `gradient_checkpointing: attention` what its attention multiplies. That is
copied to pinned host memory on a stream of its own while the next layers compute, and comes back while the layers
behind it run backward. A row's length is then bounded by time and host memory: of all layers, the GPU holds what two
keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Offloading:
    """The copies of one model's layers, which run in one order."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._layer: _Layer | None = None

    def offload_input(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a layer that recomputes itself, with its first argument in host memory between the passes."""

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(hidden, *args, **kwargs)
            # Autograd hands hooks an alias of the tensor. The hook must not hold the tensor itself: it lives as long as
            # what it has packed.
            own = _place(hidden)
            self._layer = _Layer(before=self._layer)

            def pack(tensor: Tensor) -> Tensor | OnHost:
                # Positions, masks and rotary embeddings are those of all layers.
                return self.to_host(tensor) if _place(tensor) == own else tensor

            with saved_tensors_hooks(pack, to_device):
                return forward(hidden, *args, **kwargs)

        return run

    def to_host(self, tensor: Tensor) -> OnHost:
        """Start to copy a tensor of the layer that runs. Its memory is free once the caller lets it go."""
        assert self._layer is not None
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        copy = OnHost(tensor, self._stream, self._layer)
        self._layer.copies.append(ref(copy))
        return copy


def to_device(kept: Tensor | OnHost) -> Tensor:
    """The tensor that was given to `to_host`, or one that was not."""
    return kept if isinstance(kept, Tensor) else kept.to_device()


def _place(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


class _Layer:
    """The tensors of one layer in one pass."""

    def __init__(self, before: _Layer | None) -> None:
        self._returned = False
        # What came back belongs to an earlier pass.
        self._before = before if before is not None and not before._returned else None
        # Autograd has them, until it has let go of a pass.
        self.copies: list[ref[OnHost]] = []

    def come_back(self) -> None:
        """Start the way back of this layer's tensors, and of those of the layer before, which are needed next."""
        self.start()
        if self._before is not None:
            self._before.start()
        self._returned, self._before = True, None

    def start(self) -> None:
        """Start the way back of this layer's tensors."""
        copies, self.copies = self.copies, []
        for reference in copies:
            copy = reference()
            if copy is not None:
                copy.start()


class OnHost:
    """A tensor in pinned host memory."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, layer: _Layer) -> None:
        self._stream, self._device, self._layer = stream, tensor.device, layer
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        # The allocator may give its memory to others once the copy is done.
        tensor.record_stream(stream)

    def to_device(self) -> Tensor:
        """The tensor on its device, in time for the current stream."""
        self._layer.come_back()
        copy, self._copy = self._copy, None
        assert copy is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return copy

    def start(self) -> None:
        """Start the way back."""
        self._copy = torch.empty_like(self._host, device=self._device)
        if self._stream is None:
            self._copy.copy_(self._host)
            return
        # Its memory may still be read by what the current stream has to do before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self._host, non_blocking=True)
            self._arrived = self._stream.record_event()
