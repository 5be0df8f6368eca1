"""Compile a plan for GPUs that this machine does not have, into Triton cache directories for other machines.

    (baked,) = bake(plan, ["sm_90"], Path("out"))      out/sm_90 is a Triton cache directory with a manifest

`bake` verifies that new processes without a C compiler load all kernels without compiling.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager

from .compile import Compiled, Failed
from .compile_counter import count_compiles
from .cross_compile import build_library, compile_for_target, library_folders, load_library, target_of
from .plan import Plan, Specialization
from .triton_cache import GROUP, add_digests, keys, load

MANIFEST = "manifest.json"

Progress = Callable[[int, int, str], None]
"""Callback (kernels done, all kernels, name of the last one)."""


@dataclass(frozen=True)
class Baked:
    """Result for one architecture. without_launchers: the reason if there are no launchers, else None."""

    arch: str
    folder: Path
    compiled: tuple[Compiled, ...]
    failed: tuple[Failed, ...]
    without_launchers: str | None
    size: int
    seconds: float

    def summary(self) -> str:
        """One line for a log."""
        line = f"{self.arch}: {len(self.compiled)} kernels, {self.size / 2**20:.1f} MiB, in {self.seconds:.1f} s"
        if self.failed:
            line += f"; {len(self.failed)} failed"
        return line if self.without_launchers is None else f"{line}; no launchers: {self.without_launchers}"


@dataclass(frozen=True)
class _Task:
    """A kernel to compile for one architecture into a folder."""

    item: Specialization
    arch: str
    folder: Path


@dataclass(frozen=True)
class _Outcome:
    """Result of a task: the kernel's cache entry, and the reason if there is no launcher."""

    result: Compiled | Failed
    entry: str = ""
    without_launcher: str | None = None


def bake(
    plan: Plan, archs: Sequence[str], out: Path, *, workers: int | None = None, progress: Progress | None = None
) -> list[Baked]:
    """Compile the plan for each of `archs` into the folder `out/<arch>`, and write a manifest there.

    Use such a folder as TRITON_CACHE_DIR; it may be read-only. After moving it, call `triton_cache.relocate`, because
    Triton stores absolute paths in it.

    Args:
        plan: from `record` or `plan_model`. Workers import the modules of its kernels.
        archs: `sm_90`, `sm_100`, `gfx942`, ...
        out: created if it does not exist; `out/<arch>` must be empty.
        workers: processes; default: one per CPU core that this process may use.

    Raises:
        ValueError: an architecture is unknown, the plan is empty, or a folder is not empty.
        RuntimeError: no C compiler, or a compiled kernel is not found in the cache.
    """
    if not plan:
        raise ValueError("the plan is empty: no kernel to bake")
    targets = {arch: target_of(arch) for arch in archs}
    plans = {arch: plan.on(target) for arch, target in targets.items()}
    folders = {arch: out.resolve() / arch for arch in archs}
    for folder in folders.values():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; use another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tasks = [_Task(item, arch, folders[arch]) for arch in archs for item in plans[arch].specializations]
    workers = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        outcomes = _run(tasks, library, workers, False, progress or (lambda *_: None))
        _verify([task for task in tasks if isinstance(outcomes[task].result, Compiled)], library, workers)
    seconds = time.perf_counter() - start
    return [
        _write_manifest(
            arch, folders[arch], plans[arch], {t.item: a for t, a in outcomes.items() if t.arch == arch}, seconds
        )
        for arch in archs
    ]


def _verify(tasks: list[_Task], library: Path, workers: int) -> None:
    """Raise RuntimeError unless new processes find all kernels without a compiler."""
    for task, outcome in _run(tasks, library, workers, True, lambda *_: None).items():
        result = outcome.result
        if isinstance(result, Failed) or not result.hit:
            reason = result.error if isinstance(result, Failed) else "it was compiled again"
            raise RuntimeError(f"{task.item.name} was baked into {task.folder} and is not found there: {reason}")


def _run(tasks: list[_Task], library: Path, workers: int, read_only: bool, progress: Progress) -> dict[_Task, _Outcome]:
    """Run the tasks in worker processes. If the compiler crashes, only the task of that process fails."""
    outcomes: dict[_Task, _Outcome] = {}
    waiting = tasks
    while waiting:
        for task, outcome in _in_pool(waiting, library, workers, read_only):
            outcomes[task] = outcome
            progress(len(outcomes), len(tasks), f"{task.arch} {task.item.name}")
        lost = [task for task in waiting if task not in outcomes]
        if not lost:
            break
        # These were running or queued when a worker died. Run the first one alone: it may have crashed the worker.
        suspect, waiting = lost[0], lost[1:]
        alone = dict(_in_pool([suspect], library, 1, read_only))
        died = Failed(suspect.item.name, suspect.item.signature, "the compiler crashed, and its process with it")
        outcomes[suspect] = alone.get(suspect, _Outcome(died))
        progress(len(outcomes), len(tasks), f"{suspect.arch} {suspect.item.name}")
    return outcomes


def _in_pool(tasks: list[_Task], library: Path, workers: int, read_only: bool) -> Iterator[tuple[_Task, _Outcome]]:
    """Yield the outcomes as workers finish, until a worker dies."""
    # Spawn, not fork: torch has threads, and Triton caches compiled kernels in memory.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (str(library), read_only)) as pool:
        try:
            futures: dict[Future[_Outcome], _Task] = {
                pool.submit(_compile_in_worker, task.item.to_dict(), task.arch, str(task.folder)): task
                for task in tasks
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            return


def _start_worker(library: str, read_only: bool) -> None:
    """Initialize a worker process."""
    load_library(Path(library))
    # Omit intermediate representations, most of an entry's size, which are not used at run time.
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    if read_only:
        os.environ["CC"] = "/bin/false"


def _compile_in_worker(kernel: dict[str, Any], arch: str, folder: str) -> _Outcome:
    """In a worker: compile a kernel and its launchers."""
    os.environ["TRITON_CACHE_DIR"] = folder
    item = Specialization.from_dict(kernel)
    start = time.perf_counter()
    with count_compiles() as compiles, _captured_output() as output:
        try:
            compiled, problem = compile_for_target(item, target_of(arch))
        except Exception as error:
            # Compilers raise many exception classes; all go into the manifest.
            return _Outcome(Failed(item.name, item.signature, _shorten(f"{type(error).__name__}: {error}", output())))
    result = Compiled(item.name, item.signature, time.perf_counter() - start, compiles.count == 0)
    return _Outcome(result, get_cache_manager(compiled.hash).key, problem)


@contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """Capture the output of this process and its children; yields a function that returns the text."""
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)

        def text() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield text
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def _shorten(error: str, output: str) -> str:
    """The error, and the first line of the compiler's output that contains one."""
    first = next((line for line in output.splitlines() if "error:" in line), "")
    return f"{error.strip()[:300]}{'; ' if first else ''}{first.strip()[:200]}"


def _write_manifest(
    arch: str, folder: Path, plan: Plan, outcomes: Mapping[Specialization, _Outcome], seconds: float
) -> Baked:
    """Add digests to the entries, remove incomplete ones, and write the manifest."""
    for key in keys(folder):
        if load(folder, key) is None:
            # Left over from a failed compilation.
            shutil.rmtree(folder / key)
        else:
            add_digests(folder, key)
    results = [outcome.result for outcome in outcomes.values()]
    problem = next((outcome.without_launcher for outcome in outcomes.values() if outcome.without_launcher), None)
    entries = {key: _files(folder / key) for key in keys(folder)}
    baked = Baked(
        arch=arch,
        folder=folder,
        compiled=tuple(result for result in results if isinstance(result, Compiled)),
        failed=tuple(result for result in results if isinstance(result, Failed)),
        without_launchers=problem,
        size=sum(file["size"] for files in entries.values() for file in files.values()),
        seconds=seconds,
    )
    kernels = [
        {"name": item.name, "signature": item.signature, "entry": outcome.entry}
        for item, outcome in outcomes.items()
        if outcome.entry
    ]
    manifest = {
        "arch": arch,
        "plan": plan.hash,
        **built_with(plan),
        "library_folders": library_folders() if target_of(arch).backend == "cuda" else (),
        "without_launchers": problem,
        "kernels": kernels,
        "failed": [asdict(failure) for failure in baked.failed],
        "entries": entries,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return baked


def _files(entry: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of an entry's files, except group files, whose contents change when the folder is moved."""
    return {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(entry.iterdir())
        if not path.name.startswith(GROUP)
    }


def built_with(plan: Plan) -> dict[str, str]:
    """The versions for which a cache of this plan is valid. Its keys depend on all of them except torch.

    triton, libtriton: the compiler; its wheels differ by Python version. python: the ABI of launchers. sources: a hash
    of the sources of the planned kernels and all functions that they call.
    """
    library = next(Path(triton.__file__).parent.glob("_C/libtriton*"))
    sources = sorted({str(item.kernel.cache_key) for item in plan.specializations})
    return {
        "triton": triton.__version__,
        "torch": torch.__version__,
        "python": str(sysconfig.get_config_var("SOABI")),
        "libtriton": hashlib.sha256(library.read_bytes()).hexdigest(),
        "sources": hashlib.sha256("\n".join(sources).encode()).hexdigest(),
    }
