"""The stack is removed and installed again while runs train and wait. The last test: others need the stack."""

import os
import subprocess
import time

import pytest

from tasks.runtime.run_folder.record import CompletionRecord
from tests.e2e.helpers.cluster import MIDDLE, SUCCEEDED, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "STRATA_E2E_REMOVE" not in os.environ,
        reason="STRATA_E2E_REMOVE and STRATA_E2E_INSTALL have no commands that remove and install the stack",
    ),
]


def shell(name):
    subprocess.run(os.environ[name], shell=True, check=True, timeout=600)


def kinds(cluster):
    """Kueue's kinds that the API server has."""
    from kubernetes import client

    found = client.ApiextensionsV1Api().list_custom_resource_definition().items
    return {kind.metadata.name for kind in found if kind.spec.group == "kueue.x-k8s.io"}


def test_runs_go_on_after_the_stack_was_removed_and_installed_again(cluster, undisturbed):
    undisturbed.wait()
    losses = undisturbed.losses()
    # So many steps that it still trains when it is told to stop.
    long = {"training": {"steps": 600}, "checkpoint": {"every": 50}}
    with cluster.held("express"):
        waits = cluster.submit("waits", resources={"queue": "express"})
        until("it waits", waits.jobs)
        trains = cluster.submit("trains", **long)
        trains.until_step(MIDDLE)
    begin = time.monotonic()
    shell("STRATA_E2E_REMOVE")
    print(f"removed in {time.monotonic() - begin:.0f} s")
    assert not kinds(cluster)
    # Their jobs and what they wrote are there, and no pod is left that waits for what is gone.
    assert trains.job()["spec"]["runPolicy"]["suspend"] and waits.job()["spec"]["runPolicy"]["suspend"]
    assert not trains.pods("worker")
    shell("STRATA_E2E_INSTALL")
    assert len(kinds(cluster)) > 5
    for run, restarts in ((trains, 1), (waits, 0)):
        until(f"{run.id} has ended", run.phase)
        # A flyteadmin that keeps all in its memory knows the runs no longer; propeller and the runs' folders do.
        assert {node["phase"] for node in cluster.kept(run.id)["status"]["nodeStatus"].values()} == {SUCCEEDED}
        record = CompletionRecord.model_validate_json(run.file("record.json"))
        assert (record.status, record.restarts) == ("complete", restarts)
    assert waits.losses() == losses
