"""A sweep on a cluster: an execution for each run, and what came of them side by side."""

import csv
from pathlib import Path

import pytest
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from strata_platform.spec.grid import Grid
from tests.e2e.helpers.cluster import Run, named, until
from workflows.sweep import sweep

pytestmark = pytest.mark.slow


def test_each_run_is_an_execution_of_its_own_and_the_best_comes_out(cluster):
    spec = named("sweep", topology={"nnodes": 1}, parallel={"type": "single"}, training={"steps": 4})
    grid = Grid(fields={"optimizer.lr": [1e-3, 1e-9]})
    before = {execution.id.name for execution in cluster.remote.recent_executions()}
    inputs = {"spec": spec, "grid": grid}
    started = cluster.remote.execute(cluster.register(sweep), inputs, type_hints={"spec": RunSpec, "grid": Grid})
    run = Run(cluster, spec, started)
    until("the sweep has ended", run.is_done)
    run.wait()
    of_runs = {execution.id.name for execution in cluster.remote.recent_executions()} - before - {run.id}
    assert len(of_runs) == 2
    best = run.output("best", RunSpec)
    assert (best.name, best.optimizer.lr) == (f"{spec.name}-001", 1e-3)
    rows = list(csv.DictReader(Path(run.output("table", FlyteFile).download()).read_text().splitlines()))
    assert [row["run"] for row in rows] == [f"{spec.name}-001", f"{spec.name}-002"]
    assert float(rows[0]["validation loss"]) < float(rows[1]["validation loss"])
