"""The process of the warm-up; it reads the spec as JSON from standard input.

Run as `python -m tasks.runtime.warmup.compile_process REPORT KERNELS PLAN [IMAGE...]`.

Kernels come from Triton's cache directory, from the images, from the store, or from the compiler, in that order.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strata_kernels.warmup import Plan, warmup
from strata_kernels.warmup.budget import Patience
from strata_kernels.warmup.environment import current_target, environment
from strata_kernels.warmup.seed import Seeder
from strata_kernels.warmup.store import KERNELS
from strata_platform.spec import RunSpec
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.record import write_json
from tasks.runtime.warmup import inductor_cache
from tasks.runtime.warmup.plan import plan_kernels
from tasks.runtime.warmup.pod import caches_graphs
from tasks.runtime.warmup.store import open_store

log = logging.getLogger("tasks.runtime.warmup.compile_process")


def warm_kernels(spec: RunSpec, images: list[Path]) -> tuple[dict[str, Any], Plan, list[dict[str, Any]]]:
    """Make everything ready that a step of this spec launches; the report, the plan, and what its kernels are."""
    patience = Patience(spec.kernels.store.timeout)
    with ThreadPoolExecutor(1) as beside:
        # Meanwhile: it waits for the store, and for nothing else.
        taken = beside.submit(inductor_cache.fetch_graphs, spec, images, patience) if caches_graphs(spec) else None
        start = time.perf_counter()
        plan = plan_kernels(spec) if spec.kernels.enabled else Plan(())
        plan_seconds = time.perf_counter() - start
        seeder = _seeder(spec, images, patience)
        with seeder.at_work():
            report = warmup(plan)
        seeder.push()
    log.info("warm-up: %s", report.summary())
    if report.skipped is None:
        counts = ", ".join(f"{number} {origin}" for origin, number in seeder.counts().items())
        log.info("warm-up: kernels by where they came from: %s; %d entries given to the store", counts, seeder.pushed)
    result = {
        **report.to_dict(),
        **seeder.to_dict(),
        "plan_seconds": plan_seconds,
        "compile_seconds": sum(kernel.seconds for kernel in report.compiled if not kernel.hit),
        "load_seconds": sum(kernel.seconds for kernel in report.compiled if kernel.hit),
        **(taken.result() if taken is not None else {}),
    }
    return result, plan, [kernel.to_dict() for kernel in seeder.kernels]


def _seeder(spec: RunSpec, images: list[Path], patience: Patience) -> Seeder:
    directory = Path(os.environ["TRITON_CACHE_DIR"])
    if not torch.cuda.is_available():
        return Seeder(directory, patience=patience)
    target = current_target()
    store = open_store(spec.kernels.store, environment(target), KERNELS, patience.problems)
    return Seeder(directory, _for_chip(images, target.arch), store, patience)


def _for_chip(images: list[Path], arch: int | str) -> list[Path]:
    """An image has a folder for each chip that it was baked for; a cache directory has none."""
    folders = [(image, image / (f"sm_{arch}" if isinstance(arch, int) else arch)) for image in images]
    return [baked if baked.is_dir() else image for image, baked in folders]


def main() -> None:
    """Warm up for a spec and write the report to the path given."""
    configure_logging()
    spec = RunSpec.model_validate_json(sys.stdin.read())
    report, kernels, planned = (Path(path) for path in sys.argv[1:4])
    result, plan, described = warm_kernels(spec, [Path(image) for image in sys.argv[4:]])
    for problem in result["problems"]:
        log.warning("warm-up: %s", problem)
    write_json(kernels, described)
    planned.write_text(plan.to_json(), encoding="utf-8")
    write_json(report, result)


if __name__ == "__main__":
    main()
