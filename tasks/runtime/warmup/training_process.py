"""What a warm-up left to each training process: modules to load, graphs to give on, and a count of what it missed."""

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
from tasks.runtime.warmup.pod import caches_graphs, late_compiles, plan_path, report_path

log = logging.getLogger(__name__)


class TrainingWarmup:
    """This process's part in a warm-up, from its report to the record."""

    def __init__(
        self, report: dict[str, Any], misses: list[dict[str, str]], loading: ModuleLoader, giver: GraphArchiver | None
    ):
        self.report, self.misses, self._loading, self._giver = report, misses, loading, giver

    def wait_until_loaded(self) -> None:
        """Call before the first step: waits until all modules are loaded."""
        self._loading.wait()

    def step_ended(self) -> None:
        """Call after every step."""
        if self._giver is not None:
            self._giver.step_ended()

    def close(self) -> None:
        """Call after the last step."""
        if self._giver is not None:
            self._giver.close()

    def to_dict(self) -> dict[str, Any]:
        """For the record: the report of the warm-up, and what came after it."""
        return {
            **self.report,
            **self._loading.to_dict(),
            **({} if self._giver is None else self._giver.to_dict()),
            "later_compiles": len(self.misses),
            "later_misses": self.misses,
        }


@contextmanager
def training_warmup(
    spec: RunSpec, folder: RunFolder, processes: Processes, report: dict[str, Any]
) -> Iterator[TrainingWarmup]:
    """Load the modules of what was planned while the model is built, and count what is compiled from now on.

    Call when this process has its GPU.
    """
    with late_compiles(folder) as misses:
        planned = spec.kernels.enabled and spec.kernels.warmup
        loading = ModuleLoader(plan_path(report_path(folder)) if planned else None, processes)
        try:
            yield TrainingWarmup(
                report, misses, loading, GraphArchiver(spec, processes) if caches_graphs(spec) else None
            )
        finally:
            loading.wait()


class ModuleLoader:
    """Every kernel of a plan is read and put onto this process's GPU, by a thread, while the model is built.

    Otherwise that happens at its first launch: in the first step, one after the other, while other processes wait in a
    collective. Nothing is launched: loading is what takes long, and arguments of made-up sizes could write anywhere.
    """

    def __init__(self, plan: Path | None, processes: Processes) -> None:
        """`plan`: its file, which need not be there."""
        self._device = processes.device
        self._modules, self._seconds, self._waited = 0, 0.0, 0.0
        self._thread: Thread | None = None
        if self._device.type == "cuda" and plan is not None and plan.exists():
            self._thread = Thread(target=self._load, args=(plan,), daemon=True, name="kernels")
            self._thread.start()

    def wait(self) -> None:
        """Until all are loaded. One that fails is told; it fails anew, or not, when it is launched."""
        if self._thread is None:
            return
        start = time.perf_counter()
        self._thread.join()
        self._thread, self._waited = None, time.perf_counter() - start
        log.info("warm-up: %d modules loaded in %.2f s, of which %.2f were waited for", *self._said())

    def to_dict(self) -> dict[str, Any]:
        """How many modules, the seconds that it took beside the model, and those that training waited for it."""
        if not self._modules:
            return {}
        return dict(zip(("modules", "module_seconds", "module_wait_seconds"), self._said(), strict=True))

    def _said(self) -> tuple[int, float, float]:
        return self._modules, self._seconds, self._waited

    def _load(self, plan: Path) -> None:
        start = time.perf_counter()
        try:
            with torch.cuda.device(self._device):
                # One at a time: every process of the pod loads, and none may keep its model waiting.
                report = warmup(Plan.from_json(plan.read_text(encoding="utf-8")), workers=1)
        except (OSError, ValueError) as error:
            log.warning("warm-up: modules are loaded when they are launched: %s", error)
            return
        self._modules, self._seconds = len(report.compiled), time.perf_counter() - start
        for kernel in report.failed:
            log.warning("warm-up: %s was not loaded: %s", kernel.name, kernel.error)
