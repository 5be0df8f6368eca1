"""The process that compiles a run's kernels: `python -m tasks.runtime.warmup.compile_process REPORT [IMAGE...]`.

It reads the spec as JSON from standard input and writes `WarmupFiles` beside REPORT. It looks for a kernel in Triton's
cache directory, in the folders of IMAGE, in the store, and compiles what it does not find.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from strata_kernels.warmup import Plan, warmup
from strata_kernels.warmup.cache_filler import CacheFiller
from strata_kernels.warmup.environment import current_target, environment
from strata_kernels.warmup.kernel_description import KernelDescription
from strata_kernels.warmup.store import KERNELS
from strata_kernels.warmup.time_budget import CircuitBreaker
from strata_platform.spec import KernelStore, RunSpec
from tasks.runtime.process.log import configure_logging
from tasks.runtime.warmup import inductor_cache
from tasks.runtime.warmup.plan import plan_kernels
from tasks.runtime.warmup.pod import caches_graphs
from tasks.runtime.warmup.store import open_store
from tasks.runtime.warmup.warmup_metadata import WarmupFiles, WarmupMetadata

log = logging.getLogger("tasks.runtime.warmup.compile_process")


def warm_kernels(spec: RunSpec, images: list[Path]) -> tuple[WarmupMetadata, Plan, list[KernelDescription]]:
    """Compile or fetch every kernel that a step of `spec` launches.

    Returns:
        The metadata of the warm-up, the plan, and a description of each of its kernels.
    """
    breaker = CircuitBreaker(spec.kernels.store.timeout)
    with ThreadPoolExecutor(1) as executor:
        # A thread fetches graphs meanwhile: it only waits for the store.
        cached = caches_graphs(spec.kernels, spec.training)
        graphs = executor.submit(inductor_cache.fetch_graphs, spec, images, breaker) if cached else None
        start = time.perf_counter()
        plan = plan_kernels(spec) if spec.kernels.enabled else Plan(())
        plan_seconds = time.perf_counter() - start
        filler = _cache_filler(spec.kernels.store, images, breaker)
        with filler.installed():
            report = warmup(plan)
        filler.push()
    log.info("warm-up: %s", report.summary())
    if report.skipped is None:
        counts = ", ".join(f"{number} {origin}" for origin, number in filler.counts().items())
        log.info("warm-up: kernels by origin: %s; %d entries uploaded to the store", counts, filler.pushed)
    metadata = WarmupMetadata.model_validate(report.to_dict() | filler.to_dict()).updated(
        WarmupMetadata() if graphs is None else graphs.result(),
        plan_seconds=plan_seconds,
        compile_seconds=sum(kernel.seconds for kernel in report.compiled if not kernel.hit),
        load_seconds=sum(kernel.seconds for kernel in report.compiled if kernel.hit),
    )
    return metadata, plan, filler.kernels


def _cache_filler(settings: KernelStore, images: list[Path], breaker: CircuitBreaker) -> CacheFiller:
    directory = Path(os.environ["TRITON_CACHE_DIR"])
    if not torch.cuda.is_available():
        return CacheFiller(directory, breaker=breaker)
    target = current_target()
    store = open_store(settings, environment(target), KERNELS, breaker.problems)
    return CacheFiller(directory, _for_chip(images, target.arch), store, breaker)


def _for_chip(images: list[Path], arch: int | str) -> list[Path]:
    """The subfolder of each baked image for a GPU of `arch`; a plain cache directory has no subfolders."""
    folders = [(image, image / (f"sm_{arch}" if isinstance(arch, int) else arch)) for image in images]
    return [baked if baked.is_dir() else image for image, baked in folders]


def main() -> None:
    """Warm up for the spec on standard input."""
    configure_logging()
    spec = RunSpec.model_validate_json(sys.stdin.read())
    files = WarmupFiles(Path(sys.argv[1]))
    metadata, plan, kernels = warm_kernels(spec, [Path(image) for image in sys.argv[2:]])
    for problem in metadata.problems or ():
        log.warning("warm-up: %s", problem)
    files.write(metadata, plan, kernels)


if __name__ == "__main__":
    main()
