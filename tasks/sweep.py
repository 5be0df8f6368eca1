"""Flyte tasks of a sweep: expand a grid into runs, and compare their results."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

from flytekit import Deck, task
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile

from strata_platform.outcomes import PREEMPTED
from strata_platform.spec import RunSpec, dump_spec
from strata_platform.spec.grid import Grid
from tasks.paths import fetched, file, is_local
from tasks.resources import CONTROL_TASK
from tasks.runtime.process.log import configure_logging
from tasks.runtime.process.signals import Preempted
from tasks.runtime.report.comparison import Trial, render_comparison
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord

log = logging.getLogger(__name__)

T = TypeVar("T")


class Swept(NamedTuple):
    """The outputs of a sweep: the spec of its best run, and a table of all runs."""

    best: RunSpec
    table: FlyteFile


def outcome(run: Callable[[], T]) -> T | None:
    """The result of a run of the sweep; on one machine None if the run failed, so that the others still run.

    On a cluster nothing has run yet when this returns, so an exception is not a run's failure. A signal to this process
    ends the sweep.
    """
    if not is_local():
        return run()
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        return run()
    except Exception as error:
        if any(isinstance(cause, Preempted | SignalException) for cause in _causes(error)):
            raise SystemExit(PREEMPTED.exit_code) from error
        log.error("a run of the sweep did not finish: %s", error)
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the chain of its causes and contexts."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


@task(**CONTROL_TASK)
def expand(spec: RunSpec, grid: Grid) -> list[RunSpec]:
    """Expand the grid; a combination that the spec rejects fails before any run starts."""
    configure_logging()
    runs = grid.runs(spec)
    log.info("sweep: %d runs of %s", len(runs), ", ".join(grid.fields))
    return runs


@task(**CONTROL_TASK)
def read_record(record: FlyteFile) -> CompletionRecord:
    """The completion record of an exported run."""
    return CompletionRecord.load(fetched(record))


@task(**CONTROL_TASK, enable_deck=True, deck_fields=())
def compare(spec: RunSpec, grid: Grid, runs: list[RunSpec], records: list[CompletionRecord | None]) -> Swept:
    """Sort the runs by validation loss, those that did not finish last, and write the table and the best spec.

    Raises:
        ValueError: no run finished.
    """
    configure_logging()
    trials, table = _tabulate(Path(spec.output) / spec.name, grid, runs, records)
    if trials[0].loss is None:
        raise ValueError(f"no run of the sweep finished; the log above has each one's error, and {table} lists them")
    best = next(run for run in runs if run.name == trials[0].name)
    log.info("best of %d runs: %s, loss %s", len(trials), best.name, trials[0].loss)
    table.with_name("best.yaml").write_text(dump_spec(best), encoding="utf-8")
    return Swept(best, file(table))


# Flyte passes the workflow's inputs, and the error under this name and type.
@task(**CONTROL_TASK, enable_deck=True)
def name_failures(spec: RunSpec, grid: Grid, err: Optional[FlyteError] = None) -> None:  # noqa: UP045
    """On a cluster a failed run ends the sweep: write the table of the others, and name each failed combination.

    Finished runs are read from their folders, so `output` has to be on a volume of the pods.
    """
    if is_local():
        # Where the sweep itself wrote the table.
        return
    configure_logging()
    runs = grid.runs(spec)
    files = [RunFolder.of(run).record for run in runs]
    records = [CompletionRecord.load(file) if file.exists() else None for file in files]
    _, table = _tabulate(Path(spec.output) / spec.name, grid, runs, records)
    for run, record in zip(runs, records, strict=True):
        if record is None:
            values = ", ".join(f"{path} {_value(run, path)}" for path in grid.fields)
            log.error("run %s of the sweep did not finish: %s", run.name, values)
    log.info("the other runs are in %s; Flyte says of the sweep: %s", table, err.message.strip() if err else "nothing")


def _tabulate(
    folder: Path, grid: Grid, runs: list[RunSpec], records: list[CompletionRecord | None]
) -> tuple[list[Trial], Path]:
    """The runs, best first and those without a record last, and their table in `folder`, which is also the Deck."""
    trials = sorted(
        (
            Trial(run.name, tuple(_value(run, path) for path in grid.fields), record)
            for run, record in zip(runs, records, strict=True)
        ),
        key=lambda trial: (trial.loss is None, trial.loss),
    )
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "sweep.csv"
    with table.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["run", *grid.fields, *Trial.MEASURED])
        writer.writerows([trial.name, *trial.values, *trial.measured()] for trial in trials)
    Deck("Sweep", render_comparison(folder.name, tuple(grid.fields), trials))
    return trials, table


def _value(run: RunSpec, path: str) -> Any:
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    return value
