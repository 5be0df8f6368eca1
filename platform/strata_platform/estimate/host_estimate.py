"""The memory of a run on CPUs, that of a spec with `resources.gpu: 0`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from strata_platform.estimate.memory import Memory, memory_of
from strata_platform.estimate.shapes import ModelShape
from strata_platform.estimate.workload import Workload, with_head_of
from strata_platform.spec import RunSpec

# Bytes of the interpreter and of the libraries that a process loads, instead of what CUDA holds.
_PROCESS = 0.9 * 2**30
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class HostEstimate:
    """Host memory of a run without GPUs. How long it takes depends on the CPUs, and is not estimated.

    Attributes:
        memory: of each process at its peak.
        available: bytes that `resources.memory` requests for a pod, with all of its processes.
    """

    spec: RunSpec
    shape: ModelShape
    memory: Memory
    available: float

    @property
    def peak(self) -> float:
        """Bytes of all processes of a pod."""
        return self.memory.peak * self.spec.topology.nproc_per_node

    @property
    def fits(self) -> bool:
        """Whether a pod's request covers its processes."""
        return self.peak <= self.available


def estimate_on_host(spec: RunSpec, shape: ModelShape) -> HostEstimate:
    """The memory of `spec` for a model of `shape` on CPUs, where `model.dtype: auto` is float32.

    Raises SpecError for features that are not estimated.
    """
    on_cpu = spec
    if spec.model.dtype == "auto":
        on_cpu = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "float32"})})
    shape = with_head_of(spec.model, shape)
    memory = replace(memory_of(Workload.of(on_cpu, shape)), buffers=_PROCESS)
    return HostEstimate(spec, shape, memory, _bytes(spec.resources.memory))


def _bytes(quantity: str) -> float:
    """A Kubernetes quantity of memory in bytes."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert found is not None, "the spec's own pattern"
    return float(found[1]) * _UNITS[found[2]]
