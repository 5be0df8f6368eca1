"""Flyte task: loss and samples, before and after training."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from strata_platform.spec import RunSpec
from tasks.attempts import retried_by_flyte
from tasks.resources import RETRIES
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.record import CompletionRecord


@task(retries=RETRIES)
def evaluate(
    spec: RunSpec, record: CompletionRecord, weights: FlyteDirectory, data: FlyteDirectory
) -> CompletionRecord:
    """Add losses and samples to the record of a complete run; an incomplete one is rejected."""
    configure_logging()
    from tasks.runtime.data import open_prepared
    from tasks.runtime.evaluation.evaluate_model import evaluate

    record.require_complete()
    with retried_by_flyte():
        # May read from an object store.
        prepared = open_prepared(Path(data.download()), spec.data).completed()
        return evaluate(spec, record, prepared, Path(weights.download()))
