"""Keep what recomputed layers keep in host memory between the passes (`training.activation_offloading`).

A recomputed layer keeps its input, and with `gradient_checkpointing: attention` what its attention multiplies. That is
copied to pinned host memory on a stream of its own while the next layers compute, and comes back while the layers
behind it run backward. A row's length is then bounded by time and host memory: of all layers, the GPU holds what two
keep. A third layer waits on the GPU until the copies of the first are done. (`Tensor.record_stream` instead of a wait
would free memory when the host sees that a copy is done, and the host is whole layers ahead.)
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
            self._layer.let_go()

            def pack(tensor: Tensor) -> Tensor | OnHost:
                # Positions, masks and rotary embeddings are those of all layers.
                return self.to_host(tensor) if _place(tensor) == own else tensor

            with saved_tensors_hooks(pack, to_device):
                return forward(hidden, *args, **kwargs)

        return run

    def to_host(self, tensor: Tensor) -> OnHost:
        """Start to copy a tensor of the layer that runs. Its memory is free two layers later."""
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

    def let_go(self) -> None:
        """Give up the device's memory of the tensors of the second layer before this."""
        first = self._before._before if self._before is not None else None
        for reference in first.copies if first is not None else ():
            copy = reference()
            if copy is not None:
                copy.let_go()

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
    """A tensor in pinned host memory, and on its device until `let_go`."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, layer: _Layer) -> None:
        self._stream, self._device, self._layer = stream, tensor.device, layer
        # Not what came before it in the graph.
        self._tensor: Tensor | None = tensor.detach()
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copied: torch.cuda.Event | None = None
        self._copy(self._host, self._tensor)

    def let_go(self) -> None:
        """Free the device's memory for what the current stream does after the copy."""
        self._wait()
        self._tensor = None

    def start(self) -> None:
        """Start the way back of a tensor that has been let go."""
        if self._tensor is None:
            self._tensor = torch.empty_like(self._host, device=self._device)
            self._copy(self._tensor, self._host)

    def to_device(self) -> Tensor:
        """The tensor on its device, in time for the current stream."""
        self._layer.come_back()
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        self._wait()
        return tensor

    def __del__(self) -> None:
        # A pass that ends early: nobody else may get memory that is still copied.
        if self._tensor is not None:
            self._wait()

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        # What is copied must be there, and what is copied to may still be read by what the current stream did before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
