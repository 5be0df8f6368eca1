"""The warm-up in a training process: load the planned modules, archive new graphs, record late compiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from strata_kernels.warmup import Plan, warmup
from strata_platform.spec import RunSpec
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.warmup.inductor_cache import GraphArchiver
from tasks.runtime.warmup.pod import caches_graphs, late_compiles, warmup_files
from tasks.runtime.warmup.warmup_metadata import LateCompile, WarmupMetadata

log = logging.getLogger(__name__)


class TrainingWarmup:
    """This process's side of the warm-up, from the pod's metadata to those of the completion record."""

    def __init__(
        self,
        pod: WarmupMetadata,
        misses: list[LateCompile],
        modules: ModuleLoader,
        archiver: GraphArchiver | None,
    ) -> None:
        """`pod` holds the metadata of the pod's warm-up in its first process; `misses` grows while training runs."""
        self._pod, self.misses, self._modules, self._archiver = pod, misses, modules, archiver

    def wait_until_loaded(self) -> None:
        """Wait until all modules are loaded. Call it before the first step."""
        self._modules.wait()

    def step_ended(self) -> None:
        """Call after every step."""
        if self._archiver is not None:
            self._archiver.step_ended()

    def close(self) -> None:
        """Call after the last step."""
        if self._archiver is not None:
            self._archiver.close()

    def metadata(self) -> WarmupMetadata:
        """All that is known now: the pod's metadata, and this process's modules, graphs and late compiles."""
        graphs = WarmupMetadata() if self._archiver is None else self._archiver.metadata()
        return self._pod.updated(
            self._modules.metadata(), graphs, later_compiles=len(self.misses), later_misses=tuple(self.misses)
        )

    def to_dict(self) -> dict[str, Any]:
        """`metadata` as plain data, for the record, the trackers and Prometheus."""
        return self.metadata().to_dict()


@contextmanager
def training_warmup(
    spec: RunSpec, folder: RunFolder, processes: Processes, pod: WarmupMetadata
) -> Iterator[TrainingWarmup]:
    """Load the planned modules in a thread while the caller builds the model, and record late compiles.

    Enter it after this process has selected its GPU.
    """
    with late_compiles(folder) as misses:
        planned = spec.kernels.enabled and spec.kernels.warmup
        modules = ModuleLoader(warmup_files(folder).plan if planned else None, processes)
        try:
            archiver = GraphArchiver(spec, processes) if caches_graphs(spec.kernels, spec.training) else None
            yield TrainingWarmup(pod, misses, modules, archiver)
        finally:
            modules.wait()


class ModuleLoader:
    """Loads every kernel of a plan onto this process's GPU, in a thread.

    Without it, each kernel loads at its first launch: one after the other in the first step, while the other ranks wait
    in a collective. The loader launches no kernel: loading takes most of the time, and a launch with made-up sizes
    could write anywhere.
    """

    def __init__(self, plan: Path | None, processes: Processes) -> None:
        """`plan`: the plan's file. Without a plan, without that file or without a GPU, nothing is loaded."""
        self._device = processes.device
        self._modules, self._seconds, self._waited = 0, 0.0, 0.0
        self._thread: Thread | None = None
        if self._device.type == "cuda" and plan is not None and plan.exists():
            self._thread = Thread(target=self._load, args=(plan,), daemon=True, name="kernels")
            self._thread.start()

    def wait(self) -> None:
        """Wait until every kernel is loaded, or has failed with a warning. A failed kernel is tried again at launch."""
        if self._thread is None:
            return
        start = time.perf_counter()
        self._thread.join()
        self._thread, self._waited = None, time.perf_counter() - start
        log.info(
            "warm-up: %d modules loaded in %.2f s, %.2f s of which training waited",
            self._modules,
            self._seconds,
            self._waited,
        )

    def metadata(self) -> WarmupMetadata:
        """Number of modules, seconds of loading, and seconds that training waited; empty if none was loaded."""
        if not self._modules:
            return WarmupMetadata()
        return WarmupMetadata(modules=self._modules, module_seconds=self._seconds, module_wait_seconds=self._waited)

    def _load(self, plan: Path) -> None:
        start = time.perf_counter()
        try:
            with torch.cuda.device(self._device):
                # One worker: every process of the pod loads modules, and its model must not wait for the CPU.
                report = warmup(Plan.from_json(plan.read_text(encoding="utf-8")), workers=1)
        except (OSError, ValueError) as error:
            log.warning("warm-up: the plan cannot be read, and modules load when they are launched: %s", error)
            return
        self._modules, self._seconds = len(report.compiled), time.perf_counter() - start
        for kernel in report.failed:
            log.warning("warm-up: %s was not loaded: %s", kernel.name, kernel.error)
