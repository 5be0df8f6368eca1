"""Compile a plan for GPUs that are not here, into folders that pods read instead of compiling.

    (baked,) = bake(plan, ["sm_90"], Path("out"))      out/sm_90 is a cache of Triton's, with a manifest

What is written is read back in new processes that have no C compiler: it is good if nothing is compiled there.
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
from .cross_compile import build_library, library_folders, load_library, prepare, target_of
from .plan import Plan, Specialization
from .triton_cache import GROUP, keys, load, seal

MANIFEST = "manifest.json"

Progress = Callable[[int, int, str], None]
"""Told how many of how many kernels are done, and which was the last."""


@dataclass(frozen=True)
class Baked:
    """One folder, for one architecture; `without_launchers` says why it has none, and is None where it has them."""

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
    """A kernel to compile for an architecture, into a folder."""

    item: Specialization
    arch: str
    folder: Path


@dataclass(frozen=True)
class _Answer:
    """What it says: the kernel's entry in the cache, and why it has no launcher."""

    result: Compiled | Failed
    entry: str = ""
    without_launcher: str | None = None


def bake(
    plan: Plan, archs: Sequence[str], out: Path, *, workers: int | None = None, progress: Progress | None = None
) -> list[Baked]:
    """Compile the plan for each of `archs` into the folder `out/<arch>`, and write a manifest there.

    Triton finds what is in such a folder when it is its cache directory. It may be read-only. Where it is moved, it
    has to be relocated: Triton notes absolute paths in it.

    Args:
        plan: from `record` or `plan_model`; kernels by the names of their modules, which workers import.
        archs: `sm_90`, `sm_100`, `gfx942`, ...
        out: is made; what is to be written must not be there.
        workers: processes; by default one per CPU core that this process may use.

    Raises:
        ValueError: an unknown architecture, an empty plan, or a folder that has something in it.
        RuntimeError: no C compiler, or what was written is not found again.
    """
    if not plan:
        raise ValueError("the plan is empty: there is nothing to bake")
    targets = {arch: target_of(arch) for arch in archs}
    plans = {arch: plan.on(target.backend) for arch, target in targets.items()}
    folders = {arch: out.resolve() / arch for arch in archs}
    for folder in folders.values():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; give another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tasks = [_Task(item, arch, folders[arch]) for arch in archs for item in plans[arch].specializations]
    workers = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        answers = _run(tasks, library, workers, False, progress or (lambda *_: None))
        _read_back([task for task in tasks if isinstance(answers[task].result, Compiled)], library, workers)
    seconds = time.perf_counter() - start
    return [
        _finish(arch, folders[arch], plans[arch], {t.item: a for t, a in answers.items() if t.arch == arch}, seconds)
        for arch in archs
    ]


def _read_back(tasks: list[_Task], library: Path, workers: int) -> None:
    """Raises RuntimeError unless new processes find all of it, and need no compiler."""
    for task, answer in _run(tasks, library, workers, True, lambda *_: None).items():
        result = answer.result
        if isinstance(result, Failed) or not result.hit:
            reason = result.error if isinstance(result, Failed) else "it was compiled again"
            raise RuntimeError(f"{task.item.name} was baked into {task.folder} and is not found there: {reason}")


def _run(tasks: list[_Task], library: Path, workers: int, read_only: bool, progress: Progress) -> dict[_Task, _Answer]:
    """Every task, in processes of their own. A compiler that crashes takes its process with it, and no other task."""
    answers: dict[_Task, _Answer] = {}
    waiting = tasks
    while waiting:
        for task, answer in _in_pool(waiting, library, workers, read_only):
            answers[task] = answer
            progress(len(answers), len(tasks), f"{task.arch} {task.item.name}")
        lost = [task for task in waiting if task not in answers]
        if not lost:
            break
        # Those that were at work when a process died; one of them killed it.
        suspect, waiting = lost[0], lost[1:]
        alone = dict(_in_pool([suspect], library, 1, read_only))
        died = Failed(suspect.item.name, suspect.item.signature, "the compiler crashed, and its process with it")
        answers[suspect] = alone.get(suspect, _Answer(died))
        progress(len(answers), len(tasks), f"{suspect.arch} {suspect.item.name}")
    return answers


def _in_pool(tasks: list[_Task], library: Path, workers: int, read_only: bool) -> Iterator[tuple[_Task, _Answer]]:
    """The answers as they come, until a process dies."""
    # Not forked: torch has threads, and a compiler that has compiled for this process remembers.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (str(library), read_only)) as pool:
        try:
            futures: dict[Future[_Answer], _Task] = {
                pool.submit(_prepare, task.item.to_dict(), task.arch, str(task.folder)): task for task in tasks
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            return


def _begin(library: str, read_only: bool) -> None:
    """In a new worker."""
    load_library(Path(library))
    # The intermediate forms of a kernel are most of its size, and nothing reads them.
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    if read_only:
        os.environ["CC"] = "/bin/false"


def _prepare(kernel: dict[str, Any], arch: str, folder: str) -> _Answer:
    """In a worker: one kernel, with what launches it."""
    os.environ["TRITON_CACHE_DIR"] = folder
    item = Specialization.from_dict(kernel)
    start = time.perf_counter()
    with count_compiles() as compiles, _said() as said:
        try:
            compiled, problem = prepare(item, target_of(arch))
        except Exception as error:
            # Whatever a compiler may raise is a line of the manifest.
            return _Answer(Failed(item.name, item.signature, _shorten(f"{type(error).__name__}: {error}", said())))
    result = Compiled(item.name, item.signature, time.perf_counter() - start, compiles.count == 0)
    return _Answer(result, get_cache_manager(compiled.hash).key, problem)


@contextmanager
def _said() -> Iterator[Callable[[], str]]:
    """What this process and those that it starts print meanwhile, kept from the terminal: compilers say a lot."""
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)

        def text() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield text
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def _shorten(error: str, said: str) -> str:
    """The error, and the first thing that a compiler called one."""
    first = next((line for line in said.splitlines() if "error:" in line), "")
    return f"{error.strip()[:300]}{'; ' if first else ''}{first.strip()[:200]}"


def _finish(arch: str, folder: Path, plan: Plan, answers: Mapping[Specialization, _Answer], seconds: float) -> Baked:
    """Vouch for the entries, write the manifest, and say what there is."""
    for key in keys(folder):
        if load(folder, key) is None:
            # A compilation that failed leaves what it had.
            shutil.rmtree(folder / key)
        else:
            seal(folder, key)
    results = [answer.result for answer in answers.values()]
    problem = next((answer.without_launcher for answer in answers.values() if answer.without_launcher), None)
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
        {"name": item.name, "signature": item.signature, "entry": answer.entry}
        for item, answer in answers.items()
        if answer.entry
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
    """Size and SHA-256 of an entry's files; not of group files, whose absolute paths change when the cache is moved."""
    return {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(entry.iterdir())
        if not path.name.startswith(GROUP)
    }


def built_with(plan: Plan) -> dict[str, str]:
    """What a cache of this plan is good for; the keys of its entries depend on all of it but torch.

    triton and libtriton: the compiler; its wheels for other versions of Python differ. python: the ABI of launchers.
    sources: of the planned kernels and of all that they call.
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
