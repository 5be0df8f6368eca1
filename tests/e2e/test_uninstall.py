"""The stack is upgraded, removed and installed again while runs train and wait. Last, because others need the stack."""

import os
import subprocess
import time

import pytest

from strata_platform.backends.job_set import NAME
from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.client import Client
from strata_platform.runs import Phase, Stage
from tasks.runtime.run_folder.record import CompletionRecord
from tests.e2e.helpers.cluster import MIDDLE, NAMESPACE, PATIENCE, SUCCEEDED, named, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "STRATA_E2E_REMOVE" not in os.environ,
        reason="STRATA_E2E_UPGRADE, STRATA_E2E_REMOVE and STRATA_E2E_INSTALL have no commands that change the stack",
    ),
]

FLAVORS = "kueue.x-k8s.io", "v1beta2", "resourceflavors"
# Three runs with four pods, which train at the same time.
SMALL = {"cpu": "400m", "memory": "2Gi"}
PAIR = {"resources": SMALL}
ALONE = {"topology": {"nnodes": 1}, "parallel": {"type": "single"}, "resources": SMALL}
# So many steps that it still trains when the stack is upgraded and when it is removed.
LONG = {"training": {"steps": 600}, "checkpoint": {"every": 50}}


def shell(name):
    begin = time.monotonic()
    subprocess.run(os.environ[name], shell=True, check=True, timeout=600)
    print(f"{name} took {time.monotonic() - begin:.0f} s")


def kinds():
    """Kueue's kinds that the API server has, each with what it is known by."""
    from kubernetes import client

    found = client.ApiextensionsV1Api().list_custom_resource_definition().items
    return {kind.metadata.name: kind.metadata.uid for kind in found if kind.spec.group == "kueue.x-k8s.io"}


@pytest.fixture
def theirs(cluster):
    """The name of an object of Kueue's that is not of the release."""
    body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "theirs"}}
    cluster.custom.create_cluster_custom_object(*FLAVORS, body)
    yield "theirs"
    cluster.custom.delete_cluster_custom_object(*FLAVORS, "theirs")


def uids(run):
    return {pod.metadata.uid for pod in run.pods("dn0" if run.spec.topology.nnodes == 1 else "worker")}


def test_runs_go_on_after_the_stack_was_upgraded_and_removed_and_installed_again(cluster, undisturbed, theirs):
    # A flyteadmin that keeps all in its memory may have been started anew since.
    until("the end of the run that nothing disturbs", undisturbed.phase)
    losses, before = undisturbed.losses(), kinds()
    jobsets = Client(KubernetesBackend(NAMESPACE, image=cluster.image), poll=0.5)
    canceled = named("canceled-before", resources={"queue": "express"})
    without_flyte = named("without-flyte", **ALONE, **LONG)

    def job_set_of(spec):
        return jobsets.backend._newest(spec.name)

    def is_training(spec):
        pods = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=f"{NAME}={spec.name}").items
        return any(pod.status.phase == "Running" for pod in pods)

    def step_of(spec):
        run = jobsets.get(spec.name)
        assert not run.is_done, run.message
        return run.step or 0

    with cluster.held("express"):
        waits = cluster.submit("waits", resources={"queue": "express"})
        gated = cluster.submit("gated", **ALONE | {"resources": SMALL | {"queue": "express"}})
        jobsets.submit(canceled)
        until("the JobSet waits", lambda: jobsets.get(canceled.name).stage is Stage.WAITING)
        assert jobsets.cancel(canceled.name).phase is Phase.ABORTED
        until("the job waits", waits.jobs)
        until("the pod waits", lambda: [pod for pod in gated.pods("dn0") if pod.spec.scheduling_gates])
        pair, alone = cluster.submit("pair", **PAIR, **LONG), cluster.submit("alone", **ALONE, **LONG)
        jobsets.submit(without_flyte)
        for run in (pair, alone):
            run.until_step(MIDDLE)
        until("the JobSet trains", lambda: step_of(without_flyte) >= MIDDLE)
    pods = uids(pair) | uids(alone)
    shell("STRATA_E2E_UPGRADE")
    assert uids(pair) | uids(alone) == pods, "the upgrade stopped training"
    assert {point["attempt"] for run in (pair, alone) for point in run.points()} == {0}

    shell("STRATA_E2E_REMOVE")
    assert kinds() == before
    assert cluster.custom.get_cluster_custom_object(*FLAVORS, theirs)
    # Jobs and what they wrote are there, and nothing trains on unseen.
    assert pair.job()["spec"]["runPolicy"]["suspend"] and waits.job()["spec"]["runPolicy"]["suspend"]
    assert not pair.pods("worker") and not any(cluster.is_running(pod.metadata.name) for pod in alone.pods())
    assert job_set_of(without_flyte)["spec"]["suspend"] and not is_training(without_flyte)

    shell("STRATA_E2E_INSTALL")
    assert kinds() == before
    for run, restarts in ((pair, 1), (alone, 1), (waits, 0), (gated, 0)):
        # On two cores the three long ones take turns.
        until(f"{run.id} has ended", run.phase, 2 * PATIENCE)
        # A flyteadmin that keeps all in its memory knows the runs no longer; propeller and the runs' folders do.
        assert {node["phase"] for node in cluster.kept(run.id)["status"]["nodeStatus"].values()} == {SUCCEEDED}
        record = CompletionRecord.model_validate_json(run.file("record.json"))
        assert (record.status, record.restarts) == ("complete", restarts)
    ended = jobsets.wait(without_flyte.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts) == (Phase.SUCCEEDED, 1), ended.message
    # Of the attempts of a JobSet, a removal costs none.
    assert not job_set_of(without_flyte)["status"].get("restarts")
    # Canceled is canceled, whatever Kueue has forgotten.
    assert jobsets.get(canceled.name).phase is Phase.ABORTED
    assert job_set_of(canceled)["spec"]["suspend"] and not is_training(canceled)
    assert waits.losses() == losses
    # Of the attempts that Flyte makes of a task, a removal costs a single pod one.
    assert [pod.metadata.name.rpartition("-")[2] for pod in alone.pods("dn0")] == ["1"] and pair.attempt() == 0
