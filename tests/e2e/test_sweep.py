"""A sweep on a cluster: an execution for each run, and what came of them side by side."""

import csv
from pathlib import Path

import pytest
from flytekit.types.file import FlyteFile

from strata_platform.spec import RunSpec
from strata_platform.spec.grid import Grid
from tests.e2e.helpers.cluster import NAMESPACE, Run, named, until
from workflows.sweep import sweep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def registered(cluster):
    return cluster.register(sweep)


def swept(cluster, registered, name, **fields):
    """A sweep over these values that has ended."""
    spec = named(name, topology={"nnodes": 1}, parallel={"type": "single"}, training={"steps": 4})
    inputs = {"spec": spec, "grid": Grid(fields=fields)}
    run = Run(cluster, spec, cluster.remote.execute(registered, inputs, type_hints={"spec": RunSpec, "grid": Grid}))
    until("the sweep has ended", run.is_done)
    return spec, run


def test_each_run_is_an_execution_of_its_own_and_the_best_comes_out(cluster, registered):
    before = {execution.id.name for execution in cluster.remote.recent_executions()}
    spec, run = swept(cluster, registered, "sweep", **{"optimizer.lr": [1e-3, 1e-9]})
    run.wait()
    of_runs = {execution.id.name for execution in cluster.remote.recent_executions()} - before - {run.id}
    assert len(of_runs) == 2
    best = run.output("best", RunSpec)
    assert (best.name, best.optimizer.lr) == (f"{spec.name}-001", 1e-3)
    rows = list(csv.DictReader(Path(run.output("table", FlyteFile).download()).read_text().splitlines()))
    assert [row["run"] for row in rows] == [f"{spec.name}-001", f"{spec.name}-002"]
    assert float(rows[0]["validation loss"]) < float(rows[1]["validation loss"])


def test_a_run_that_fails_is_named_with_its_values_and_the_table_has_the_others(cluster, registered):
    # No queue admits the second.
    spec, run = swept(cluster, registered, "sweep-fails", **{"resources.cpu": ["800m", "2"]})
    good, bad = f"{spec.name}-001", f"{spec.name}-002"
    assert "at most 1.6 CPUs can be had" in run.error()
    (pod,) = run.pods("-fn0-")
    said = cluster.core.read_namespaced_pod_log(pod.metadata.name, NAMESPACE)
    assert f"run {bad} of the sweep did not finish: resources.cpu 2" in said and good not in said
    rows = list(csv.DictReader(run.file("sweep.csv").splitlines()))
    assert [row["run"] for row in rows] == [good, bad]
    assert float(rows[0]["validation loss"]) > 0 and not rows[1]["validation loss"]
