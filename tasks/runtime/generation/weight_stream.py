"""Weights from the process that trains to those that generate: JSON and raw tensors over one process group.

Each part is a broadcast of its two lengths, of its names, dtypes and shapes as JSON, and of the tensors' bytes, many
small ones together. Nothing is pickled. A transfer has a group of its own, so that a process that dies leaves no state
that the next transfer would meet.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

_PART_BYTES = 64 << 20
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
# Between looks at a broadcast, and at whether the other members are there.
_PAUSE_SECONDS = 0.0002
_LOOK_SECONDS = 0.5
# In the store, once the sender is gone.
_GONE = "gone"
# Of each tensor in a part: views of another dtype begin at a multiple of its size.
_ALIGNMENT = 16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a transfer find each other: a store, and the keys in it that begin with `prefix`.

    Rank 0 is the process that trains; the others, 1 to `size - 1`, get the weights. backend: `gloo` or `nccl`.
    loopback: whether this member listens for others of this machine alone.
    """

    host: str
    port: int
    prefix: str
    size: int
    backend: str
    loopback: bool = False
    seconds: float = 300.0
    """How long a member waits for another."""


class TransferBroken(RuntimeError):
    """A member of a transfer is gone, or does not come in time. Another transfer may succeed."""


class WeightGroup:
    """A process group of one transfer, apart from the default group of the process. A context manager that ends it.

    is_whole: whether the other members are still there, as far as this one can tell; by default, whether nobody has
    told the store otherwise (`watched_sender`). NCCL itself would wait for one that is gone, and so does Gloo if it has
    got a part of a tensor.

    Raises:
        TransferBroken: the other members do not come in time.
    """

    def __init__(
        self,
        address: GroupAddress,
        rank: int,
        device: torch.device,
        *,
        is_whole: Callable[[], bool] | None = None,
    ) -> None:
        self._of_nccl = address.backend == "nccl"
        timeout = timedelta(seconds=address.seconds)
        self.device = torch.device("cpu") if address.backend == "gloo" else device
        self._timeout = timeout
        with _breaks():
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                address.host, address.port, is_master=False, timeout=timeout
            )
            store = dist.PrefixStore(address.prefix, store)  # type: ignore[attr-defined]
            self._is_whole = is_whole or (lambda: not store.check([_GONE]))
            self._group = _MAKERS[address.backend](store, rank, address, timeout)

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Free what a communicator takes of the GPU; after an error, also end the kernels that wait for a member."""
        if not self._of_nccl and kind is not None:
            _free_later(self._group, self._timeout.total_seconds())
        elif self._of_nccl:
            try:
                self._group.shutdown() if kind is None else self._group.abort()
            # The weights have arrived, or the transfer has failed already.
            except RuntimeError as error:
                log.warning("NCCL did not free the communicator of a transfer of weights: %s", error)
        self._group = None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send `tensor` from rank 0, or overwrite it with what rank 0 sends. PyTorch: `dist.broadcast(tensor, 0)`.

        Raises:
            TransferBroken: a member is gone, or does not come in time.
        """
        if tensor.numel():
            with _breaks():
                work = self._group.broadcast(tensor, 0)
                self._watch(work)
                work.wait(self._timeout)
        return tensor

    def _watch(self, work: Any) -> None:
        """Return when the work is done or has failed, or its time is over."""
        began = looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                if now - began >= self._timeout.total_seconds() or not self._is_whole():
                    raise TransferBroken("a member of the transfer is gone, or did not come in time")
            time.sleep(_PAUSE_SECONDS)


def gpu_of(device: torch.device) -> str:
    """What tells a GPU from all others, on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_own_gpus(receivers: int, of_sender: Iterable[str]) -> bool:
    """Whether this process' first `receivers` GPUs are none of the sender's: NCCL takes each GPU once."""
    if not torch.cuda.is_available():
        return False
    return {gpu_of(torch.device("cuda", number)) for number in range(receivers)}.isdisjoint(of_sender)


@contextmanager
def watched_sender(store: Any, prefix: str, is_there: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, the receivers of the transfer at `prefix` are told when its sender is gone. Otherwise they
    could wait for it until the transfer times out (`WeightGroup`).

    store: at which they meet. is_there: whether the sender still is.
    """
    ended = Event()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            if not is_there():
                dist.PrefixStore(prefix, store).set(_GONE, "1")  # type: ignore[attr-defined]
                return

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _free_later(group: Any, seconds: float) -> None:
    """Free a group of Gloo after this time. Its destructor waits until a pending broadcast has timed out, and holds the
    interpreter's lock meanwhile.
    """
    kept = [group]

    def free() -> None:
        time.sleep(seconds)
        kept.clear()

    Thread(target=free, daemon=True).start()


@contextmanager
def _breaks() -> Iterator[None]:
    """Raise a failure of torch's stores and groups, a RuntimeError like many others, as `TransferBroken`."""
    try:
        yield
    except RuntimeError as error:
        raise TransferBroken(str(error)) from error


def _gloo(store: Any, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    make: Any = dist.ProcessGroupGloo
    options._devices = [make.create_device(hostname="127.0.0.1") if address.loopback else make.create_default_device()]
    return make(store, rank, address.size, options)


def _nccl(store: Any, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    make: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
    options = make.Options()
    options._timeout = timeout
    # Read when the group is made: without it, a thread of the group ends the process at an error, though another
    # transfer may succeed.
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        return make(store, rank, address.size, options)
    finally:
        if before is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = before


_MAKERS = {"gloo": _gloo, "nccl": _nccl}


@torch.no_grad()
def send_weights(weights: Iterable[tuple[str, Tensor]], group: WeightGroup) -> None:
    """Send names and weights, in order. Called by rank 0.

    Raises:
        TransferBroken: a receiver is gone, or does not come in time.
    """
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in weights:
        bytes_ = _aligned(weight.nbytes)
        if part and size + bytes_ > _PART_BYTES:
            _send_part(part, group)
            part, size = [], 0
        part.append((name, weight.detach()))
        size += bytes_
    if part:
        _send_part(part, group)
    group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device))


def receive_weights(group: WeightGroup) -> Iterator[tuple[str, Tensor]]:
    """Names and weights that rank 0 sends, on the group's device; the next part overwrites none of them.

    Raises:
        TransferBroken: the sender is gone, or does not come in time.
        ValueError: what came is no part of a transfer.
    """
    while True:
        sizes = group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
        if sizes == [0, 0]:
            return
        text, data = (
            group.broadcast(torch.empty(size, dtype=torch.uint8, device=group.device)) for size in sizes
        )  # fmt: skip
        place = 0
        for name, dtype, shape in json.loads(bytes(text.tolist())):
            if dtype not in _DTYPES:
                raise ValueError(f"weight {name!r} has the dtype {dtype!r}, which transfers do not know")
            kind = _DTYPES[dtype]
            size = torch.Size(shape).numel() * kind.itemsize
            yield name, data[place : place + size].view(kind).view(shape)
            place += _aligned(size)


def _send_part(part: list[tuple[str, Tensor]], group: WeightGroup) -> None:
    shapes = [(name, str(weight.dtype).removeprefix("torch."), list(weight.shape)) for name, weight in part]
    text = torch.frombuffer(bytearray(json.dumps(shapes).encode()), dtype=torch.uint8)
    data = torch.zeros(sum(_aligned(weight.nbytes) for _, weight in part), dtype=torch.uint8, device=group.device)
    place = 0
    for _, weight in part:
        size = weight.nbytes
        data[place : place + size].copy_(weight.contiguous().flatten().view(torch.uint8))
        place += _aligned(size)
    group.broadcast(torch.tensor([text.numel(), data.numel()], device=group.device))
    group.broadcast(text.to(group.device))
    group.broadcast(data)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
