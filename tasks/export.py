"""Flyte task: the trained model as a plain Hugging Face folder, the report, the record."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from strata_platform.redact import redacted
from strata_platform.spec import RunSpec, dump_spec
from tasks.attempts import retried_by_flyte
from tasks.paths import directory, file
from tasks.resources import RETRIES
from tasks.runtime.process.log import configure_logging
from tasks.runtime.report import render_body
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord


class Exported(NamedTuple):
    """The outputs of a run."""

    model: FlyteDirectory
    report: FlyteFile
    record: FlyteFile


@task(retries=RETRIES, enable_deck=True, deck_fields=())
def export(spec: RunSpec, record: CompletionRecord, weights: FlyteDirectory, data: FlyteDirectory) -> Exported:
    """Write the model, the report and the record. The report is also the task's Deck."""
    configure_logging()
    from tasks.runtime.data import open_prepared
    from tasks.runtime.export.export_model import export

    trained = Path(weights.download())
    with retried_by_flyte():
        # May read from an object store.
        prepared = open_prepared(Path(data.download()), spec.data).completed()
        folder = export(spec, record, prepared, trained)
    Deck("Training", render_body(record, read_points(trained / folder.metrics.name), redacted(dump_spec(spec))))
    return Exported(directory(folder.model), file(folder.report), file(folder.record))
