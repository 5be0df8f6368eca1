"""What is wrong with a node's GPUs, from what NVML says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from strata_platform.doctor.nvml import GpuState, Xid

_RESET = "drain the node and reboot it; if it comes back, have the GPU replaced"
_COOL = "look at the node's cooling and power supply"
_CABLE = "reseat or replace the GPU, its riser or baseboard"

# Bits of nvmlClocksEventReasons that no load explains. A power cap (0x4) is normal.
_SLOWDOWNS = {0x40: "it is too hot", 0x80: "the power supply brakes it", 0x8: "its hardware brakes it"}

# XIDs for which NVIDIA's catalogue names the hardware or a reset. Others are of programs, or come with one of these.
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "the GPU's microcontroller has stopped",
    64: "row remapping has failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor has failed",
    140: "memory error that was not recovered",
    143: "the GPU did not start",
}

CONDITION = "GpuUnhealthy"
"""Condition of a node, which the chart's health check keeps."""

Kind = Literal["lost", "xid", "ecc", "row-remapping", "slowdown", "pcie", "nvlink", "missing"]


@dataclass(frozen=True)
class Fault:
    """A GPU that runs should not get."""

    gpu: int
    kind: Kind
    message: str
    advice: str
    number: int | None = None
    """Of the XID; of the GPUs that the node should have if one is missing."""

    def __str__(self) -> str:
        return f"GPU {self.gpu}: {self.message}"


def xid_fault(xid: Xid) -> Fault | None:
    """The fault that an XID tells of; None if it is one of applications."""
    what = HARDWARE_XIDS.get(xid.number)
    return None if what is None else Fault(xid.index, "xid", f"XID {xid.number}, {what}", _RESET, xid.number)


def driver_fault(why: object) -> Fault:
    """The fault of a driver that does not work: nothing is known of any GPU."""
    return Fault(0, "lost", f"the driver does not work: {why}", "look at dmesg and the driver's pod")


def faults(gpus: Sequence[GpuState], expected: int | None = None) -> list[Fault]:
    """The faults of a node's GPUs. `expected`: how many the node should have."""
    found = [fault for gpu in gpus for fault in _of(gpu, gpus)]
    if expected is not None and len(gpus) < expected:
        message = f"the driver has {len(gpus)} GPUs, and the node should have {expected}"
        found.append(Fault(len(gpus), "missing", message, _RESET, expected))
    return found


def _of(gpu: GpuState, gpus: Sequence[GpuState]) -> Iterable[Fault]:
    if gpu.lost is not None:
        yield Fault(gpu.index, "lost", f"it does not answer: {gpu.lost}", _RESET)
        return
    for kind, look, advice in _CHECKS:
        message = look(gpu, gpus)
        if message is not None:
            yield Fault(gpu.index, kind, message, advice)


def _ecc(gpu: GpuState, gpus: Sequence[GpuState]) -> str | None:
    number = gpu.uncorrected_errors
    return f"{number} uncorrectable memory errors since the driver was loaded" if number else None


def _rows(gpu: GpuState, gpus: Sequence[GpuState]) -> str | None:
    if gpu.remap_failed:
        return "memory rows could not be remapped: there are no spare ones left"
    return "memory rows are to be remapped, which a reset does" if gpu.remap_pending else None


def _slowdown(gpu: GpuState, gpus: Sequence[GpuState]) -> str | None:
    reason = next((why for bit, why in _SLOWDOWNS.items() if (gpu.slowdown or 0) & bit), None)
    return f"its clocks are lowered: {reason}" if reason else None


def _pcie(gpu: GpuState, gpus: Sequence[GpuState]) -> str | None:
    if gpu.pcie_width is None or gpu.pcie_width_max is None or gpu.pcie_width >= gpu.pcie_width_max:
        return None
    return f"{gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes are in use"


def _links(gpu: GpuState, gpus: Sequence[GpuState]) -> str | None:
    """Links to nowhere are down on many boards: what counts is how many the other GPUs of the node have."""
    most = max(other.links or 0 for other in gpus)
    return f"{gpu.links or 0} NVLinks are up, and {most} of other GPUs here" if (gpu.links or 0) < most else None


_CHECKS: tuple[tuple[Kind, Callable[[GpuState, Sequence[GpuState]], str | None], str], ...] = (
    ("row-remapping", _rows, _RESET),
    ("ecc", _ecc, _RESET),
    ("nvlink", _links, _CABLE),
    ("pcie", _pcie, _CABLE),
    ("slowdown", _slowdown, _COOL),
)
