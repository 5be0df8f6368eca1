"""What NVIDIA's management library says of a node's GPUs, without CUDA and without memory of a GPU.

The library comes with the driver. A container has it if NVIDIA's runtime mounts it: capability `utility`. Names,
constants and structures are those of nvml.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _TIMEOUT, _FUNCTION_NOT_FOUND = 2, 3, 4, 10, 13
_LOST = 15
# What a GPU does not have, or does not tell.
_UNKNOWN = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND)
_UNCORRECTED, _SINCE_DRIVER_LOADED = 1, 0
_XID_EVENT = 0x8
_RECOVERIES = 1
# More than any GPU has.
_MOST_LINKS = 64

_Number, _Large = ctypes.c_uint, ctypes.c_ulonglong


class NvmlMissing(Exception):
    """The library cannot be loaded: this machine has no NVIDIA driver, or the container does not see it."""


class NvmlError(Exception):
    """The library answers with an error."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text}")
        self.code = code


@dataclass(frozen=True)
class GpuState:
    """One GPU, now. None: it does not have or tell this."""

    index: int
    lost: str | None = None
    """Why it does not answer; then nothing else is known."""
    uncorrected_errors: int | None = None
    """ECC errors that memory could not correct, since the driver was loaded."""
    remap_pending: bool | None = None
    """Rows or pages of memory are to be replaced, which a reset of the GPU does."""
    remap_failed: bool | None = None
    """There is no row left to replace a bad one with."""
    slowdown: int | None = None
    """Reasons for which the clocks are lowered, as bits of nvmlClocksEventReasons."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: int | None = None
    """NVLinks that are up."""
    link_recoveries: int | None = None
    """How often NVLinks had to be trained again, since the driver was loaded."""


@dataclass(frozen=True)
class Xid:
    """An error that the driver has reported."""

    index: int
    """Of the GPU."""
    number: int


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", _Large),
        ("data", _Large),
        ("gpu_instance", _Number),
        ("compute_instance", _Number),
    )


class Nvml:
    """The library, from `__init__` to `close`. Whoever has it open keeps a GPU from being reset."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises NvmlMissing without a library, NvmlError if the driver does not work."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlMissing(str(error)) from error
        self._call("nvmlInit_v2")
        self._devices: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        self._events = ctypes.c_void_p()
        count = _Number()
        try:
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        except NvmlError:
            self.close()
            raise
        for index in range(count.value):
            device = ctypes.c_void_p()
            try:
                self._call("nvmlDeviceGetHandleByIndex_v2", _Number(index), ctypes.byref(device))
            except NvmlError as error:
                self._lost[index] = str(error)
            else:
                self._devices[index] = device.value or 0

    def close(self) -> None:
        """Give the GPUs free. A driver that has failed may refuse, and then holds nothing."""
        if self._events:
            self._code("nvmlEventSetFree", self._events)
        self._code("nvmlShutdown")

    def gpus(self) -> list[GpuState]:
        """Every GPU of the node."""
        lost = [GpuState(index, lost=why) for index, why in self._lost.items()]
        return sorted([*lost, *map(self._state, self._devices)], key=lambda gpu: gpu.index)

    def xids(self, seconds: float) -> Iterator[Xid]:
        """Errors that come within `seconds`, each when it comes, and those since the last call or `register`."""
        if not self._events:
            self.register()
        event = _Event()
        wait = round(seconds * 1000)
        code = self._code("nvmlEventSetWait_v2", self._events, ctypes.byref(event), _Number(wait))
        while code == 0:
            if event.type == _XID_EVENT:
                found = [index for index, device in self._devices.items() if device == event.device]
                yield from (Xid(index, int(event.data)) for index in found)
            code = self._code("nvmlEventSetWait_v2", self._events, ctypes.byref(event), _Number(0))
        if code not in (_TIMEOUT, _LOST):
            raise self._error("nvmlEventSetWait_v2", code)

    def register(self) -> dict[int, str]:
        """Have the driver collect XIDs from now on. Returns the GPUs of which none will be seen, and why."""
        self._call("nvmlEventSetCreate", ctypes.byref(self._events))
        register = "nvmlDeviceRegisterEvents"
        arguments = _Large(_XID_EVENT), self._events
        codes = {
            index: self._code(register, ctypes.c_void_p(device), *arguments) for index, device in self._devices.items()
        }
        return {index: str(self._error(register, code)) for index, code in codes.items() if code} | self._lost

    def _state(self, index: int) -> GpuState:
        device = ctypes.c_void_p(self._devices[index])
        try:
            remapped = self._numbers("nvmlDeviceGetRemappedRows", device, outputs=4)
            retired = self._numbers("nvmlDeviceGetRetiredPagesPendingStatus", device)
            pending = remapped[2] if remapped else retired[0] if retired else None
            links = list(self._links(device))
            return GpuState(
                index,
                uncorrected_errors=_only(
                    self._numbers(
                        "nvmlDeviceGetTotalEccErrors",
                        device,
                        _Number(_UNCORRECTED),
                        _Number(_SINCE_DRIVER_LOADED),
                        kind=_Large,
                    )
                ),
                remap_pending=None if pending is None else bool(pending),
                remap_failed=bool(remapped[3]) if remapped else None,
                slowdown=_only(self._numbers("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=_Large)),
                pcie_width=_only(self._numbers("nvmlDeviceGetCurrPcieLinkWidth", device)),
                pcie_width_max=_only(self._numbers("nvmlDeviceGetMaxPcieLinkWidth", device)),
                links=sum(up for up, _ in links) if links else None,
                link_recoveries=sum(recoveries for _, recoveries in links) if links else None,
            )
        except NvmlError as error:
            return GpuState(index, lost=str(error))

    def _links(self, device: ctypes.c_void_p) -> Iterator[tuple[bool, int]]:
        """Of each NVLink, whether it is up, and its recoveries."""
        for link in range(_MOST_LINKS):
            up = self._numbers("nvmlDeviceGetNvLinkState", device, _Number(link))
            if up is None:
                return
            number = self._numbers(
                "nvmlDeviceGetNvLinkErrorCounter", device, _Number(link), _Number(_RECOVERIES), kind=_Large
            )
            yield bool(up[0]), number[0] if number else 0

    def _numbers(self, function: str, *arguments: Any, outputs: int = 1, kind: Any = _Number) -> list[int] | None:
        """What the function writes; None if the GPU or the driver does not have it."""
        written = [kind() for _ in range(outputs)]
        code = self._code(function, *arguments, *map(ctypes.byref, written))
        if code in _UNKNOWN:
            return None
        if code:
            raise self._error(function, code)
        return [int(number.value) for number in written]

    def _call(self, function: str, *arguments: Any) -> None:
        if code := self._code(function, *arguments):
            raise self._error(function, code)

    def _code(self, function: str, *arguments: Any) -> int:
        try:
            found = getattr(self._library, function)
        except AttributeError:
            return _FUNCTION_NOT_FOUND
        return int(found(*arguments))

    def _error(self, function: str, code: int) -> NvmlError:
        describe = self._library.nvmlErrorString
        describe.restype = ctypes.c_char_p
        return NvmlError(function, code, (describe(code) or b"unknown error").decode(errors="replace"))


def _only(numbers: list[int] | None) -> int | None:
    return numbers[0] if numbers else None
