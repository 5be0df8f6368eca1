"""Measure a model before and after training, and write it as a Hugging Face folder with its report.

One step, because both need the packages and the GPU that training needed, and a pod starts in seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

from strata_platform.file_io import write_atomic
from strata_platform.redact import redacted
from strata_platform.runs import Stage
from strata_platform.spec import DataRecipe, RunSpec, dump_spec
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.process.imports import uncollected
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.retry import retried

log = logging.getLogger(__name__)

# Objectives that may name code of the user's.
_OWN_CODE = ("custom", "grpo")


class Finished(NamedTuple):
    """The folder of a finished run, its report as HTML to show in a page, and the hash of its data's recipe."""

    folder: RunFolder
    report: str
    recipe_hash: str


def finish(spec: RunSpec, record: CompletionRecord, weights: Path, data: Path) -> Finished:
    """Evaluate a complete run, and write the model, the report and the record."""
    with uncollected():
        from tasks.runtime.data import open_prepared
        from tasks.runtime.evaluation.evaluate_model import evaluate
        from tasks.runtime.export.export_model import export
        from tasks.runtime.report import render_body
        from tasks.runtime.run_folder.metrics_file import read_points

    record.require_complete()
    with retried():
        # May read from an object store.
        prepared = open_prepared(data, spec.data).completed()
        report_progress(stage=Stage.EVALUATING)
        record = evaluate(spec, record, prepared, weights)
        report_progress(stage=Stage.EXPORTING)
        folder = export(spec, record, prepared, weights)
    report = render_body(record, read_points(weights / folder.metrics.name), redacted(dump_spec(spec)))
    return Finished(folder, report, prepared.manifest.recipe_hash)


class Outputs(NamedTuple):
    """Where the outputs of a run are stored, and the hashes of the spec (`spec_hash`) and of the data."""

    spec_hash: str
    recipe_hash: str
    model: str
    report: str
    record: str


def spec_hash(spec: RunSpec) -> str:
    """The hash of the spec, and of tasks of the evaluation in files that it names: with others, scores are others."""
    files = [Path(task) for task in spec.evaluation.tasks if task.endswith((".yaml", ".yml"))]
    contents = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(b"\n".join((spec.hash().encode(), *contents))).hexdigest() if contents else spec.hash()


def note_outputs(folder: RunFolder, outputs: Outputs) -> None:
    """Remember in the run's folder where its outputs are stored."""
    write_atomic(folder.stored_outputs, json.dumps(outputs._asdict()).encode(), durable=True)


def stored_outputs(spec: RunSpec, recipe: DataRecipe) -> Outputs | None:
    """Where the outputs of a run that has finished with this very spec and these data were stored.

    Warns of code of the objective that has changed since. Raises ValueError if a folder that the spec names has other
    weights than when the run began.
    """
    folder = RunFolder.of(spec)
    note = folder.stored_outputs
    if not note.exists():
        return None
    try:
        outputs = Outputs(**json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s); the outputs of the run are created again", note, error)
        return None
    if outputs[:2] != (spec_hash(spec), recipe.hash()):
        return None
    if began_with := folder.initial_weights_ids:
        # Imported here: torch takes seconds, and most runs that plan have not finished.
        from tasks.runtime.models.initial_weights import require_initial_weights

        require_initial_weights(spec, began_with)
    if spec.objective.type in _OWN_CODE and folder.record.exists():
        from tasks.runtime.extensions.own_code import warn_of_changed_code

        warn_of_changed_code(spec.objective, CompletionRecord.load(folder.record).code)
    return outputs
