"""Compile a run's kernels once per pod, before its training processes start, and fetch graphs of `torch.compile`.

Kernels compile in a separate process (`tasks.runtime.warmup.compile_process`), so that its crash, hang or CUDA
context does not affect training. Training starts in any case, and the metadata records what happened. Without a GPU
there are no kernels, and this process fetches the graphs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from strata_kernels.warmup.kernel_description import KernelDescription, difference, on_cache_miss
from strata_kernels.warmup.time_budget import CircuitBreaker
from strata_platform.file_io import acquire_lock
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.training import Training
from tasks.runtime.models.attention import flash_attention_4
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import write_json
from tasks.runtime.warmup import inductor_cache
from tasks.runtime.warmup.warmup_metadata import LateCompile, WarmupFiles, WarmupMetadata

log = logging.getLogger(__name__)

# Names the report of a finished or failed warm-up, for the processes that this one starts.
DONE = "STRATA_WARMUP_DONE"
BAKED_KERNELS = "STRATA_BAKED_KERNELS"
"""Environment variable with the folder of kernels in the image."""

# Variables that the pod's first process sets for the others.
_SHARED_VARIABLES = ("TRITON_CACHE_DIR", inductor_cache.FOLDER, flash_attention_4.KEEP, flash_attention_4.FOLDER)
# Prefix of the kernels that `torch.compile` generates.
_GENERATED = "triton_"
# Space that a cache directory must have: a few hundred kernels.
_REQUIRED_BYTES = 32 << 20
# Where a pod can write. Memory comes first: it is there even if the disk is full.
_TEMPORARY = tuple(dict.fromkeys((Path("/dev/shm"), Path(tempfile.gettempdir()))))  # noqa: S108


def warm_up_pod(spec: RunSpec, folder: RunFolder) -> WarmupMetadata:
    """Warm up this pod, unless the agent that started this process has done so.

    The first process that gets the pod's lock warms up, and the others wait for it. Sets TRITON_CACHE_DIR,
    TORCHINDUCTOR_CACHE_DIR for graphs, and the folder of FlashAttention 4's kernels. Never raises: after a failed
    warm-up, training compiles as it goes.

    Returns:
        The metadata in the pod's first process, and empty ones in the others.
    """
    reason = _reason_to_skip(spec.kernels)
    files = warmup_files(folder)
    done = os.environ.get(DONE) == str(files.report)
    os.environ[DONE] = str(files.report)
    if reason is not None and not done:
        log.info("warm-up: %s", reason)
    if reason is not None and not caches_graphs(spec.kernels, spec.training):
        return WarmupMetadata(skipped=reason)
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    try:
        if not done:
            with _first_in_pod(files.report) as turn:
                if turn.is_mine:
                    _run_warmup(spec, files, reason)
                else:
                    os.environ.update(turn.variables)
        return files.read_report() if first else WarmupMetadata()
    except (OSError, ValueError) as error:
        return _skipped_warmup(f"its report cannot be read: {error}") if first else WarmupMetadata()


def caches_graphs(kernels: Kernels, training: Training) -> bool:
    """Whether Strata fetches and archives graphs of `torch.compile`, and kernels of FlashAttention 4 if installed.

    Otherwise only PyTorch caches graphs, and each process compiles those kernels.
    """
    return kernels.warmup and (training.compile or flash_attention_4.tested_version() is not None)


@contextlib.contextmanager
def late_compiles(folder: RunFolder) -> Iterator[list[LateCompile]]:
    """Record the kernels that this process compiles within the block, and how they differ from the planned ones.

    Skips kernels that `torch.compile` generates, because no plan can contain them.
    """
    planned = warmup_files(folder).read_kernels()
    found: list[LateCompile] = []

    def on_miss(kernel: KernelDescription) -> None:
        if kernel.name.startswith(_GENERATED):
            return
        found.append(LateCompile(kernel=kernel.name, difference=difference(kernel, planned)))
        log.warning("compiled during training: %s: %s", kernel.name, found[-1].difference)

    with on_cache_miss(on_miss):
        yield found


def _run_warmup(spec: RunSpec, files: WarmupFiles, reason: str | None) -> None:
    """Compile kernels, unless there is a `reason` to skip them, fetch graphs, and write the report."""
    files.report.parent.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    if caches_graphs(spec.kernels, spec.training):
        try:
            inductor_cache.use_new_folder(_private_folders()[-1] / "graphs", str(files.report))
        except (OSError, IndexError) as error:
            problems.append(f"graphs are compiled but not kept: no folder can be written ({error})")
    if torch.cuda.is_available():
        report = _warm_up_kernels(spec, files)
    else:
        report = WarmupMetadata(skipped=reason)
        if not problems:
            breaker = CircuitBreaker(spec.kernels.store.timeout, problems)
            fetched = inductor_cache.fetch_graphs(spec, _baked(), breaker)
            report = report.updated(fetched, store_seconds=breaker.spent)
    if problems:
        log.warning("warm-up: %s", "; ".join(problems))
        report = _with_problems(report, problems)
    if report.graphs_from:
        log.info(
            "warm-up: %d files that an earlier start compiled, from the %s", report.graph_files, report.graphs_from
        )
    write_json(files.report, report.to_dict())


def _with_problems(report: WarmupMetadata, problems: list[str]) -> WarmupMetadata:
    return report.updated(problems=(*problems, *(report.problems or ())))


def _baked() -> list[Path]:
    return [Path(os.environ[BAKED_KERNELS])] if os.environ.get(BAKED_KERNELS) else []


def _warm_up_kernels(spec: RunSpec, files: WarmupFiles) -> WarmupMetadata:
    """Run the compile process with the first cache directory that can be written."""
    deadline = time.monotonic() + spec.kernels.warmup_timeout
    configured = inductor_cache.triton_directory()
    problems: list[str] = []
    report: WarmupMetadata | None = None
    for directory in [configured, *(folder / "triton" for folder in _private_folders())]:
        problem = _space_problem(directory)
        if problem is None:
            os.environ["TRITON_CACHE_DIR"] = str(directory)
            # A directory that cannot be written may still be readable.
            images = [*_baked(), *([] if directory == configured else [configured])]
            report = _run(spec, files, images, max(deadline - time.monotonic(), 1.0))
            problem = report.unwritable
        if problem is None:
            break
        problems.append(f"{directory} cannot be used: {problem}")
        log.warning("warm-up: %s", problems[-1])
    else:
        os.environ["TRITON_CACHE_DIR"] = str(configured)
    if report is None:
        report = _skipped_warmup("no directory can hold Triton's cache")
    return _with_problems(report, problems) if problems else report


def _run(spec: RunSpec, files: WarmupFiles, images: list[Path], timeout: float) -> WarmupMetadata:
    """Run the compile process and return its metadata; if it fails, `skipped` says why."""
    files.remove()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.runtime.warmup.compile_process", *map(str, (files.report, *images))],
            input=spec.model_dump_json(),
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return _skipped_warmup(f"given up after kernels.warmup_timeout {spec.kernels.warmup_timeout} s")
    except OSError as error:
        return _skipped_warmup(f"its process did not start: {error}")
    if done.returncode != 0 or not files.report.exists():
        return _skipped_warmup(f"its process ended with code {done.returncode}")
    try:
        return files.read_report()
    except ValueError as error:
        return _skipped_warmup(f"its report cannot be read: {error}")


def _skipped_warmup(problem: str) -> WarmupMetadata:
    log.warning("warm-up: %s; training starts anyway and compiles as it goes", problem)
    return WarmupMetadata(skipped=problem)


def warmup_files(folder: RunFolder) -> WarmupFiles:
    """The files that this pod's warm-up writes to the run's folder."""
    return WarmupFiles(folder.root / f"warmup-{socket.gethostname()}.json")


def _reason_to_skip(kernels: Kernels) -> str | None:
    if not kernels.enabled:
        return "kernels.enabled is false; nothing to compile"
    if not torch.cuda.is_available():
        return "no GPU here; operators run their PyTorch reference, nothing to compile"
    if not kernels.warmup:
        return "kernels.warmup is false; kernels are compiled when they are first used"
    return None


class _Turn:
    """A process's turn in the pod: whether it is the first, or the variables that the first one set."""

    def __init__(self, left: dict[str, str]) -> None:
        self.is_mine = left.get("launch") != _launch()
        self.variables = {name: left[name] for name in _SHARED_VARIABLES if name in left}


@contextlib.contextmanager
def _first_in_pod(report: Path) -> Iterator[_Turn]:
    """Let the pod's processes in one at a time; if one is killed, the operating system lets the next one in."""
    own = _private_folders()
    if not own:
        # Without a folder for the lock, each process compiles the kernels that it does not find.
        yield _Turn({})
        return
    name = hashlib.sha256(str(report).encode()).hexdigest()[:16]
    with (own[0] / f"warmup-{name}.lock").open("a+", encoding="utf-8") as file:
        acquire_lock(file)
        file.seek(0)
        text = file.read()
        turn = _Turn(json.loads(text) if text else {})
        yield turn
        if turn.is_mine:
            file.truncate(0)
            left = {name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ}
            json.dump({"launch": _launch(), **left}, file)


def _launch() -> str:
    """An identifier of this start of the pod's processes, the same for all that one torchrun starts or restarts."""
    if "LOCAL_RANK" not in os.environ:
        return f"alone {os.getpid()} {time.time_ns()}"
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {parent} {started}"


def _private_folders() -> list[Path]:
    """Folders that only this pod and this user can write, the first of them in memory."""
    found = []
    for parent in _TEMPORARY:
        folder = parent / f"strata-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
        except OSError:
            continue
        # Another user may have created the folder, and shared objects are loaded from it.
        if status.st_uid == os.getuid() and status.st_mode & 0o7777 == 0o700 and os.access(folder, os.W_OK):
            found.append(folder)
    return found


def _space_problem(directory: Path) -> str | None:
    """Why a directory cannot hold the kernels, found by writing as many bytes; None if it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            for _ in range(_REQUIRED_BYTES >> 20):
                file = files.enter_context(tempfile.TemporaryFile(dir=directory))
                os.posix_fallocate(file.fileno(), 0, 1 << 20)
    except OSError as error:
        return str(error)
    return None
