"""Keep the inputs of recomputed layers in host memory between the passes (`training.activation_offloading`).

A recomputed layer keeps its input alone. It is copied to pinned host memory on a stream of its own while the next
layers compute, and comes back while the layers behind it run backward. A row's length is then bounded by time and host
memory: of all layers' inputs, the GPU holds two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def offload_inputs(layers: Sequence[nn.Module]) -> None:
    """Offload the first argument of each of `layers`, which recompute themselves and run in this order.

    The input of the last one stays where it is: the backward pass needs it next.
    """
    copies = _Copies()
    for layer in layers[:-1]:
        layer.forward = _offloading(layer.forward, copies)


def _offloading(forward: Callable[..., Any], copies: _Copies) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Autograd hands hooks an alias of the tensor. The hook must not hold the tensor itself: it lives as long as
        # what it has packed.
        own = _place(hidden)

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            # Positions, masks and rotary embeddings are those of all layers.
            return copies.to_host(tensor) if _place(tensor) == own else tensor

        with saved_tensors_hooks(pack, _unpack):
            return forward(hidden, *args, **kwargs)

    return run


def _place(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _unpack(kept: Tensor | _OnHost) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.to_device()


class _Copies:
    """The copies of one model's layers: a stream of their own, and the copy that was made last."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: _OnHost | None = None

    def to_host(self, tensor: Tensor) -> _OnHost:
        """Start to copy `tensor`, which autograd then lets go."""
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._last = _OnHost(tensor, self._stream, before=self._last)
        return self._last


class _OnHost:
    """A tensor in pinned host memory."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, before: _OnHost | None) -> None:
        self._returned = False
        # A copy that came back belongs to an earlier pass.
        self._before = before if before is not None and not before._returned else None
        self._stream, self._device = stream, tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copy: Tensor | None = None
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        # The allocator may give its memory to others once the copy is done.
        tensor.record_stream(stream)

    def to_device(self) -> Tensor:
        """The tensor on its device, in time for the current stream. Starts the way back of the one before."""
        self._start()
        copy = self._copy
        assert copy is not None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._before is not None:
            self._before._start()
        self._returned, self._copy, self._before = True, None, None
        return copy

    def _start(self) -> None:
        if self._copy is not None or self._returned:
            return
        self._copy = torch.empty_like(self._host, device=self._device)
        if self._stream is None:
            self._copy.copy_(self._host)
            return
        # Its memory may still be read by what the current stream has to do before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self._host, non_blocking=True)
