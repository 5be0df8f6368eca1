"""Flyte task: losses and samples before and after training, and the model with its report; see `finish_step`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from strata_platform import kept_log, progress_line
from strata_platform.pod_settings import RETRIES
from strata_platform.spec import DataRecipe, RunSpec
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, fetched, file, is_local, is_stored
from tasks.runtime.process import forks
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps import finish_step as steps
from tasks.steps.pod_log import pod_log


class Exported(NamedTuple):
    """The outputs of a run."""

    model: FlyteDirectory
    report: FlyteFile
    record: FlyteFile


@task(retries=RETRIES, enable_deck=True, deck_fields=(), environment={progress_line.VARIABLE: "1", **forks.ENVIRONMENT})
def finish(spec: RunSpec, record: CompletionRecord, weights: FlyteDirectory, data: FlyteDirectory) -> Exported:
    """Evaluate a complete run, and write the model, the report and the record. The report is also the task's Deck."""
    configure_logging()
    with pod_log(spec, kept_log.FINISH, local=is_local()), retried_by_flyte(), _fork_server():
        done = steps.finish(spec, record, fetched(weights), fetched(data))
    Deck("Training", done.report)
    outputs = Exported(directory(done.folder.model), file(done.folder.report), file(done.folder.record))
    if not is_local():
        addresses = (str(output.remote_source) for output in outputs)
        steps.note_outputs(done.folder, steps.Outputs(steps.spec_hash(spec), done.recipe_hash, *addresses))
    return outputs


def _fork_server() -> AbstractContextManager[None]:
    """Made while nothing has used a GPU or threads of torch; on one machine, the process is not this task's alone."""
    return nullcontext() if is_local() else forks.fork_server("processes that read the exported model")


def finished(spec: RunSpec, recipe: DataRecipe) -> Exported | None:
    """The outputs of a run that has finished on a cluster with this very spec and these data, if all are stored."""
    outputs = None if is_local() else steps.stored_outputs(spec, recipe)
    if outputs is None or not all(map(is_stored, outputs[2:])):
        return None
    return Exported(FlyteDirectory.from_source(outputs.model), *map(FlyteFile.from_source, outputs[3:]))
