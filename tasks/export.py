"""Flyte task: the trained model as a plain Hugging Face folder, the report, the record."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from tasks.prepare import LARGE
from tasks.runtime.data import PreparedData
from tasks.runtime.export import export as export_run
from tasks.runtime.log import configure_logging
from tasks.runtime.record import CompletionRecord


class Exported(NamedTuple):
    """What a run leaves."""

    model: FlyteDirectory
    report: FlyteFile
    record: FlyteFile


@task(requests=LARGE, enable_deck=True)
def export(spec: RunSpec, record: CompletionRecord, weights: FlyteDirectory, data: FlyteDirectory) -> Exported:
    """Write the model, the report and the record; the report is the task's Deck, too."""
    configure_logging()
    prepared = PreparedData.load(Path(data.download()))
    folder = export_run(spec, record, prepared, Path(weights.download()))
    Deck("Training", folder.report.read_text(encoding="utf-8"))
    return Exported(FlyteDirectory(str(folder.model)), FlyteFile(str(folder.report)), FlyteFile(str(folder.record)))
