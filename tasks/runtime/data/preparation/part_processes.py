"""Prepare the parts of a source in several processes.

They are forks of a process that is started afresh and has imported what they need, which takes longer than a part.
This process cannot be forked: tokenizers and torch run threads in it, which a fork does not have.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import mkdtemp

from transformers import AutoTokenizer

from strata_platform.spec import DataRecipe
from tasks.runtime.data.chat.template_renderer import stop_rendering
from tasks.runtime.data.dataset import TOKENIZER
from tasks.runtime.data.preparation.encode_rows import Report
from tasks.runtime.data.preparation.part_records import prepared_parts, record_name
from tasks.runtime.data.preparation.preparation_plan import Plan, parse_plan
from tasks.runtime.data.preparation.prepare_part import PartPreparer
from tasks.runtime.data.prepared_manifest import PLAN
from tasks.runtime.data.reading.sources import open_source
from tasks.runtime.data.shard_store import ShardStore
from tasks.runtime.process.cpus import available_cpus

# Arguments of `_prepare_one`, which processes can send each other.
_Task = tuple[Path | str, Path, str, int]

_SCRATCH = ".part-"
# Sources that a process is ready for at a time, each with a tokenizer.
_READY = 8
# The first parts, whose samples are enough for evaluation.
_SAMPLED_PARTS = 4
_SECONDS_BETWEEN_REPORTS = 10.0


@dataclass(frozen=True, eq=False)
class PlannedSource:
    """A source whose parts are prepared one by one. folder: that of its plan and its tokenizer."""

    plan: Plan
    folder: Path

    @property
    def store(self) -> ShardStore:
        """The place of its shards."""
        return self.plan.store(self.folder)

    def task(self, number: int) -> _Task:
        """What a process needs to prepare a part."""
        store = self.store
        return store.folder or store.place, self.folder / TOKENIZER, self.plan.recipe_hash, number


PlannedPart = tuple[PlannedSource, int]
"""A part of a source, by its number."""


def in_turns(sources: Sequence[PlannedSource], weights: Sequence[float | None]) -> list[PlannedPart]:
    """The parts of sources in about the order in which training first reads them.

    weights: of the sources in training; without one, a source is read to its end while the others are.
    """
    found = []
    for place, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        parts = len(source.plan.parts)
        found += [(number / (weight or parts), place, number) for number in range(parts)]
    return [(sources[place], number) for _, place, number in sorted(found)]


def prepare_parts(parts: Sequence[PlannedPart], *, report: Report, processes: int | None = None) -> None:
    """Prepare parts that have no record in their store yet, in order.

    processes: by default the processors that this process may use.

    Raises:
        ValueError: as `PartPreparer.prepare`.
        RuntimeError: a process was killed.
    """
    sources = dict.fromkeys(source for source, _ in parts)
    done = {source: prepared_parts(source.store) for source in sources}
    left = [(source, number) for source, number in parts if number not in done[source]]
    for source in sources:
        for path in source.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(path, ignore_errors=True)
    if len(left) < len(parts):
        report(f"{len(parts) - len(left):,} of {len(parts):,} parts are prepared already")
    if not left:
        return
    cpus = available_cpus()
    workers = min(processes or cpus, len(left))
    threads = max(1, cpus // workers)
    report(f"preparing {len(left):,} parts in {workers} processes")
    if workers == 1:
        # No other process is worth its start.
        try:
            _wait((_prepare_one(*source.task(number)) for source, number in left), len(left), report)
        finally:
            stop_rendering()
        return
    with (
        _forking_server() as context,
        ProcessPoolExecutor(workers, context, initializer=_initialize, initargs=(threads,)) as pool,
    ):
        try:
            futures = [pool.submit(_prepare_one, *source.task(number)) for source, number in left]
            _wait((future.result() for future in as_completed(futures)), len(left), report)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that prepared data was killed, most likely for lack of memory; start again to continue with "
                "the parts that are left, on a machine with more memory or fewer processors"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # Not after the parts that have begun.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextmanager
def _forking_server() -> Iterator[BaseContext]:
    """A context whose processes are forked from one that has imported this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    try:
        yield context
    finally:
        # It would keep its memory until this process ends; nothing public stops it.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _wait(done: Iterator[tuple[int, int]], parts: int, report: Report) -> None:
    """Wait for parts, of which each gives its samples and tokens, and report how far they are."""
    samples = tokens = 0
    started = reported = time.monotonic()
    for count, (read, written) in enumerate(done, start=1):
        samples, tokens = samples + read, tokens + written
        now = time.monotonic()
        if now - reported > _SECONDS_BETWEEN_REPORTS:
            reported = now
            minutes = (now - started) / count * (parts - count) / 60
            report(
                f"{count:,} of {parts:,} parts: {samples:,} samples read, {tokens:,} tokens, "
                f"{tokens / (now - started):,.0f} tokens/s, about {minutes:.0f} min left"
            )


def _initialize(threads: int) -> None:
    """In a new process: threads of the tokenizer, and an end with the process that started it."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    # An interrupt on the terminal reaches all processes; the first one ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Its parent, as the kernel has it, is the server that it was forked from.
    first = multiprocessing.parent_process()
    assert first is not None
    threading.Thread(target=_end_with, args=(first.sentinel,), name="end with the first process", daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare_one(place: Path | str, tokenizer: Path, recipe_hash: str, number: int) -> tuple[int, int]:
    """Prepare a part in this process. Returns its samples and tokens."""
    store, plan, preparer = _preparer(place, tokenizer, recipe_hash)
    folder = Path(mkdtemp(prefix=_SCRATCH, dir=store.folder))
    try:
        record = preparer.prepare(plan.parts[number], folder, f"-{number:05d}", lambda line: None)
        if number >= _SAMPLED_PARTS:
            # Thousands of records with texts would not fit into memory together.
            del record.samples[1:]
        for shard in (*record.train.shards, *record.validation.shards):
            store.put(folder / shard.file)
        store.write(record_name(number), record.to_json())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return record.counts.read, record.train.tokens + record.validation.tokens


@lru_cache(maxsize=_READY)
def _preparer(place: Path | str, tokenizer_folder: Path, recipe_hash: str) -> tuple[ShardStore, Plan, PartPreparer]:
    store = ShardStore(place)
    plan = parse_plan(store.read(PLAN))
    assert plan is not None and plan.recipe_hash == recipe_hash
    recipe = DataRecipe.model_validate(plan.recipe)
    with warnings.catch_warnings():
        # The first process has given them.
        warnings.simplefilter("ignore")
        source = open_source(recipe)
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder), trust_remote_code=False)
        preparer = PartPreparer(recipe, source, tokenizer, plan.format_for(recipe, tokenizer))
    return store, plan, preparer
