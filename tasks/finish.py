"""Flyte task: losses and samples before and after training, and the model as a Hugging Face folder with its report.

One task, because both need the packages and the GPU that training needed, and a pod starts in seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from strata_platform import progress_line
from strata_platform.file_io import write_atomic
from strata_platform.pod_settings import RETRIES
from strata_platform.redact import redacted
from strata_platform.runs import Stage
from strata_platform.spec import DataRecipe, RunSpec, dump_spec
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, file, is_local, is_stored
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.process.imports import uncollected
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord


class Exported(NamedTuple):
    """The outputs of a run."""

    model: FlyteDirectory
    report: FlyteFile
    record: FlyteFile


@task(retries=RETRIES, enable_deck=True, deck_fields=(), environment={progress_line.VARIABLE: "1"})
def finish(spec: RunSpec, record: CompletionRecord, weights: FlyteDirectory, data: FlyteDirectory) -> Exported:
    """Evaluate a complete run, and write the model, the report and the record. The report is also the task's Deck."""
    configure_logging()
    with uncollected():
        from tasks.runtime.data import open_prepared
        from tasks.runtime.evaluation.evaluate_model import evaluate
        from tasks.runtime.export.export_model import export
        from tasks.runtime.report import render_body
        from tasks.runtime.run_folder.metrics_file import read_points

    record.require_complete()
    trained = Path(weights.download())
    with retried_by_flyte():
        # May read from an object store.
        prepared = open_prepared(Path(data.download()), spec.data).completed()
        report_progress(stage=Stage.EVALUATING)
        record = evaluate(spec, record, prepared, trained)
        report_progress(stage=Stage.EXPORTING)
        folder = export(spec, record, prepared, trained)
    Deck("Training", render_body(record, read_points(trained / folder.metrics.name), redacted(dump_spec(spec))))
    outputs = Exported(directory(folder.model), file(folder.report), file(folder.record))
    if not is_local():
        addresses = (str(output.remote_source) for output in outputs)
        note = Outputs(spec.hash(), prepared.manifest.recipe_hash, *addresses)
        write_atomic(folder.stored_outputs, json.dumps(note._asdict()).encode(), durable=True)
    return outputs


class Outputs(NamedTuple):
    """Where the outputs of a run are stored, and the hashes of the spec and of the data that they are of."""

    spec_hash: str
    recipe_hash: str
    model: str
    report: str
    record: str


def finished(spec: RunSpec, recipe: DataRecipe) -> Exported | None:
    """The outputs of a run that has finished on a cluster with this very spec and these data, if all are stored."""
    note = RunFolder.of(spec).stored_outputs
    if is_local() or not note.exists():
        return None
    outputs = Outputs(**json.loads(note.read_text(encoding="utf-8")))
    addresses = outputs.model, outputs.report, outputs.record
    if outputs[:2] != (spec.hash(), recipe.hash()) or not all(map(is_stored, addresses)):
        return None
    return Exported(FlyteDirectory.from_source(outputs.model), *map(FlyteFile.from_source, addresses[1:]))
