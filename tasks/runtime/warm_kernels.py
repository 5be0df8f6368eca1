"""The process of the warm-up: `python -m tasks.runtime.warm_kernels REPORT KERNELS [IMAGE...]`, the spec as JSON on
standard input.

Kernels come from Triton's cache directory, from the images, from the store, or from the compiler, in that order.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from strata_kernels.warmup import warmup
from strata_kernels.warmup.blobs import open_blobs
from strata_kernels.warmup.environment import current_target, environment
from strata_kernels.warmup.seed import Seeder
from strata_kernels.warmup.store import Store
from strata_platform.spec import KernelStore, RunSpec
from tasks.runtime.log import configure_logging
from tasks.runtime.plan import plan_of
from tasks.runtime.record import write_json

log = logging.getLogger("tasks.runtime.warm_kernels")

_SHORTEST_KEY = 32


def warm_kernels(spec: RunSpec, images: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make everything ready that a step of this spec launches; the report, and what was planned."""
    start = time.perf_counter()
    plan = plan_of(spec)
    plan_seconds = time.perf_counter() - start
    problems: list[str] = []
    target = current_target() if torch.cuda.is_available() else None
    store = _open(spec.kernels.store, environment(target), problems) if target is not None else None
    folders = _for_chip(images, target.arch) if target is not None else []
    directory = Path(os.environ["TRITON_CACHE_DIR"])
    seeder = Seeder(directory, folders, store, spec.kernels.store.timeout, problems)
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
    }
    return result, [kernel.to_dict() for kernel in seeder.kernels]


def _for_chip(images: list[Path], arch: int | str) -> list[Path]:
    """An image has a folder for each chip that it was baked for; a cache directory has none."""
    folders = [(image, image / (f"sm_{arch}" if isinstance(arch, int) else arch)) for image in images]
    return [baked if baked.is_dir() else image for image, baked in folders]


def _open(spec: KernelStore, place: str, problems: list[str]) -> Store | None:
    """The store of the spec; None without one, or where it cannot be opened, which is a problem and no more."""
    if spec.url is None:
        return None
    try:
        return Store(
            open_blobs(spec.url),
            place,
            signing_key=None if spec.signing_key is None else read_secret(spec.signing_key),
            allow_unsigned=spec.allow_unsigned,
            size_limit=spec.size_limit_mb << 20,
        )
    # Whatever the library of a store may raise is a line of the report.
    except Exception as error:
        problems.append(f"the store was left alone: {type(error).__name__}: {error}")
        return None


def read_secret(reference: str) -> bytes:
    """The key that `env:NAME` or `file:PATH` refers to. Raises ValueError where there is none, or a short one."""
    field = f"kernels.store.signing_key {reference!r}"
    kind, _, name = reference.partition(":")
    try:
        key = Path(name).read_bytes().strip() if kind == "file" else os.environb[name.encode()]
    except (OSError, KeyError) as error:
        raise ValueError(f"{field} is not there") from error
    if len(key) < _SHORTEST_KEY:
        raise ValueError(
            f"kernels.store.signing_key {reference!r} has {len(key)} bytes; give it {_SHORTEST_KEY} or more"
        )
    return key


def main() -> None:
    """Warm up for a spec and write the report to the path given."""
    configure_logging()
    spec = RunSpec.model_validate_json(sys.stdin.read())
    report, kernels = Path(sys.argv[1]), Path(sys.argv[2])
    result, planned = warm_kernels(spec, [Path(image) for image in sys.argv[3:]])
    for problem in result["problems"]:
        log.warning("warm-up: %s", problem)
    write_json(kernels, planned)
    write_json(report, result)


if __name__ == "__main__":
    main()
