"""What a warm-up found and did, as one object from the compile process to the completion record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from strata_kernels.warmup import Plan
from strata_kernels.warmup.kernel_description import KernelDescription
from tasks.runtime.run_folder.record import write_json


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReadyKernel(_Frozen):
    """A planned kernel that is compiled and loaded; `hit` if it was in the cache."""

    name: str
    signature: str
    seconds: float
    hit: bool


class FailedKernel(_Frozen):
    """A planned kernel that could not be compiled or loaded."""

    name: str
    signature: str
    error: str


class LateCompile(_Frozen):
    """A kernel that training compiled, and how it differs from the planned kernels of its name."""

    kernel: str
    difference: str


class WarmupMetadata(_Frozen):
    """Metadata of a warm-up. A field without a value is not known, and is absent from JSON.

    The pod's first process fills in kernels and graphs; each training process adds its own modules, graphs and late
    compiles.
    """

    skipped: str | None = None
    """Why no kernels were compiled."""
    problems: tuple[str, ...] | None = None
    """What went wrong without stopping the warm-up, one sentence each."""

    device: str | None = None
    directory: str | None = None
    """Triton's cache directory."""
    unwritable: str | None = None
    """Why that directory cannot be written."""
    planned: int | None = None
    compiled: tuple[ReadyKernel, ...] | None = None
    failed: tuple[FailedKernel, ...] | None = None
    hits: int | None = None
    cache_hits: int | None = None
    image_hits: int | None = None
    store_hits: int | None = None
    pushed: int | None = None
    """Entries uploaded to the store."""

    seconds: float | None = None
    plan_seconds: float | None = None
    compile_seconds: float | None = None
    """Summed over threads, as are `load_seconds` and `image_seconds`."""
    load_seconds: float | None = None
    image_seconds: float | None = None
    store_seconds: float | None = None

    graphs_from: str | None = None
    """Where graphs of `torch.compile` came from: cache, image or store; None if nowhere."""
    graph_files: int | None = None
    graph_seconds: float | None = None
    graphs_found: int | None = None
    graphs_compiled: int | None = None
    graphs_not_kept: int | None = None
    graphs_pushed: int | None = None
    graph_problems: tuple[str, ...] | None = None

    modules: int | None = None
    """Kernel modules loaded onto this process's GPU before the first step."""
    module_seconds: float | None = None
    module_wait_seconds: float | None = None
    later_compiles: int | None = None
    later_misses: tuple[LateCompile, ...] | None = None

    def updated(self, *others: WarmupMetadata, **metadata: Any) -> WarmupMetadata:
        """A copy with the metadata that `others` know, and with `metadata`."""
        known = {name: value for other in (self, *others) for name, value in other.known()}
        return WarmupMetadata(**{**known, **metadata})

    def known(self) -> list[tuple[str, Any]]:
        """Fields that were given a value, None included, with that value."""
        return [(name, getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the fields that are not known."""
        return self.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class WarmupFiles:
    """The files that the compile process leaves to the pod's other processes: the report, the kernels, the plan."""

    report: Path

    @property
    def kernels(self) -> Path:
        """Descriptions of the planned kernels, to which `late_compiles` compares."""
        return self.report.with_suffix(".kernels.json")

    @property
    def plan(self) -> Path:
        """The plan, whose modules every training process loads."""
        return self.report.with_suffix(".plan.json")

    def remove(self) -> None:
        """Remove what an earlier warm-up left."""
        for path in (self.report, self.kernels, self.plan):
            path.unlink(missing_ok=True)

    def write(self, metadata: WarmupMetadata, plan: Plan, kernels: Sequence[KernelDescription]) -> None:
        """Write all three. The report comes last: where it exists, so do the others."""
        write_json(self.kernels, [kernel.to_dict() for kernel in kernels])
        self.plan.write_text(plan.to_json(), encoding="utf-8")
        write_json(self.report, metadata.to_dict())

    def read_report(self) -> WarmupMetadata:
        """Raises OSError if there is no report, and ValueError if it is not one."""
        return WarmupMetadata.model_validate_json(self.report.read_bytes())

    def read_kernels(self) -> list[KernelDescription]:
        """Descriptions of the planned kernels; [] if nothing was planned."""
        try:
            return [KernelDescription.from_dict(data) for data in json.loads(self.kernels.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
