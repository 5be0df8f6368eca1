"""MLflow: one run of the experiment `tracking.project` for all attempts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers.tracker import Values, identity, settings_of
from tasks.runtime.run_folder.folder import RunFolder

log = logging.getLogger(__name__)

# Limits of one request.
METRICS, PARAMS, CHARACTERS = 1000, 100, 6000

T = TypeVar("T")


class Mlflow:
    """Logs metrics by step, and the spec's fields as parameters, to the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, spec: RunSpec, folder: RunFolder, done: int) -> None:
        # Read at import. The spec does not name MLflow's developers as a recipient.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        known = identity(folder, "mlflow")
        if not known.exists():
            # Saved at once: if a later call fails, the next attempt must find this run instead of creating another.
            known.write_text(self._begin(spec.tracking.project, spec.name))
        self._run_id = known.read_text()
        self._client.update_run(self._run_id, status="RUNNING")
        # The server rejects another value for an existing parameter.
        there = self._client.get_run(self._run_id).data.params
        fields = [Param(name, str(value)[:CHARACTERS]) for name, value in flat(settings_of(spec)) if name not in there]
        for params in chunks(fields, PARAMS):
            self._client.log_batch(self._run_id, params=params)
        log.info("tracking: mlflow run %s of experiment %s", self._run_id, spec.tracking.project)

    def _begin(self, project: str, name: str) -> str:
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        return run_id

    def log(self, values: Sequence[Values]) -> None:
        """Send the values."""
        metrics = [
            self._metric(name, value, int(time * 1000), step)
            for step, time, named in values
            for name, value in named.items()
        ]
        for some in chunks(metrics, METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, *, complete: bool) -> None:
        """End the run on the server."""
        self._client.set_terminated(self._run_id, "FINISHED" if complete else "KILLED")


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaf values by their dotted paths, such as `model.name`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in order, at most `size` at a time."""
    return (items[begin : begin + size] for begin in range(0, len(items), size))


begin = Mlflow
