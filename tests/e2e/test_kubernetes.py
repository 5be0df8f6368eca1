"""Runs without Flyte: JobSets that Kubernetes, JobSet's controller and Kueue start, repeat and end."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kubernetes import client

from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.client import Client
from strata_platform.errors import RunExists
from strata_platform.kubernetes_api import ApiError
from strata_platform.runs import Phase, Stage
from tests.e2e.helpers.cluster import MIDDLE, NAMESPACE, PATIENCE, SPEC, named, until

STEPS = SPEC["training"]["steps"]
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", NAMESPACE, "jobsets")


@pytest.fixture(scope="module")
def runs(cluster):
    try:
        cluster.custom.list_namespaced_custom_object(*JOBSETS)
    except client.ApiException as error:
        assert error.status == 404
        pytest.skip("the cluster has no JobSet; docs/testing.md")
    return Client(KubernetesBackend(NAMESPACE, image=cluster.image), poll=0.5)


def points(cluster, spec):
    text = cluster.window("sh", "-c", f"cat {spec.output}/{spec.name}/metrics.jsonl 2>/dev/null")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def losses(cluster, spec):
    """Loss and gradient norm of each step, of the last attempt that did it."""
    return {point["step"]: (point["loss"], point["grad_norm"]) for point in points(cluster, spec)}


def until_step(cluster, runs, spec, step):
    until(f"step {step} of {spec.name}", lambda: max((p["step"] for p in points(cluster, spec)), default=0) >= step)


@pytest.fixture(scope="module")
def alone(cluster, runs):
    """A run that nothing disturbs."""
    spec = named("alone")
    runs.submit(spec)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert ended.phase is Phase.SUCCEEDED, ended.message
    return spec, ended


def test_a_run_is_prepared_trained_evaluated_and_exported(cluster, runs, alone):
    spec, ended = alone
    assert (ended.step, ended.steps, ended.restarts) == (STEPS, STEPS, 0)
    assert {point.step for point in runs.metrics(spec.name)} == set(range(1, STEPS + 1))
    text = [line.text for line in runs.logs(spec.name)]
    assert any(line.startswith("validation loss") for line in text) and not any("@strata" in line for line in text)
    assert {"Submitted", "Admitted", "Scheduled", "Succeeded"} <= {event.reason for event in runs.events(spec.name)}
    outputs = runs.outputs(spec.name)
    assert "config.json" in cluster.window("ls", outputs.model)
    assert json.loads(cluster.window("cat", outputs.record))["status"] == "complete"
    (listed,) = [run for run in runs.list() if run.name == spec.name]
    assert listed.phase is Phase.SUCCEEDED


def test_a_lost_pod_costs_the_steps_since_the_checkpoint_and_no_bit(cluster, runs, alone):
    spec = named("killed")
    runs.submit(spec)
    pool = ThreadPoolExecutor(1)
    lines = pool.submit(lambda: list(runs.logs(spec.name, follow=True)))
    until_step(cluster, runs, spec, MIDDLE)
    chosen = f"strata/run={spec.name},batch.kubernetes.io/job-completion-index=1"
    (pod,) = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=chosen).items
    cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE, grace_period_seconds=0)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts, ended.step) == (Phase.SUCCEEDED, 1, STEPS), ended.message
    assert losses(cluster, spec) == losses(cluster, alone[0])
    # The log has both attempts, of both ranks.
    found = lines.result(60)
    pool.shutdown()
    assert {line.attempt for line in found} == {0, 1} and {line.rank for line in found} >= {0, 1}
    again = next(p["step"] for p in points(cluster, spec) if p["attempt"] == 1)
    assert again % SPEC["checkpoint"]["every"] == 1 and again > 1


def test_a_canceled_run_gives_its_machines_to_the_next_and_is_continued(cluster, runs, alone):
    spec, waits = named("canceled-alone"), named("waits", resources={"queue": "express"})
    runs.submit(spec)
    with pytest.raises(RunExists, match="has not ended, as JobSet"):
        runs.submit(spec)
    runs.submit(waits)
    until("it waits", lambda: runs.get(waits.name).stage is Stage.WAITING)
    assert runs.get(waits.name).phase is Phase.QUEUED and runs.get(waits.name).queue == "express"
    until_step(cluster, runs, spec, MIDDLE)
    assert runs.cancel(spec.name).phase is Phase.ABORTED
    until("the next one starts", lambda: runs.get(waits.name).phase is Phase.RUNNING)
    assert runs.cancel(waits.name).phase is Phase.ABORTED
    assert runs.submit(spec).where.endswith("-x2")
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts) == (Phase.SUCCEEDED, 1), ended.message
    assert losses(cluster, spec) == losses(cluster, alone[0])


def test_of_two_submissions_at_once_one_trains(cluster, runs):
    spec = named("twin-alone")

    def submit(_):
        try:
            return Client(KubernetesBackend(NAMESPACE, image=cluster.image)).submit(spec)
        except RunExists as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(submit, range(2)))
    assert sorted(isinstance(result, RunExists) for result in results) == [False, True]
    assert runs.cancel(spec.name).phase is Phase.ABORTED


def test_a_mistake_in_the_spec_ends_the_run_at_once_with_its_sentence(cluster, runs):
    spec = named("mistake", data={"source": "/runs/nowhere.jsonl"})
    runs.submit(spec)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts) == (Phase.FAILED, 0)
    assert "/runs/nowhere.jsonl" in ended.message


def test_members_see_runs_and_only_submitters_start_and_cancel_them(cluster, runs, alone):
    def may(user, verb, resource, group):
        command = ["kubectl", "auth", "can-i", verb, f"{resource}.{group}", "-n", NAMESPACE, f"--as={user}"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "yes"

    for verb, ada, grace in (
        ("list", True, True),
        ("create", False, True),
        ("patch", False, True),
        ("delete", False, False),
    ):
        assert may("ada", verb, "jobsets", "jobset.x-k8s.io") is ada
        assert may("grace", verb, "jobsets", "jobset.x-k8s.io") is grace
    assert not may("ada", "patch", "workloads", "kueue.x-k8s.io")
    # What a submitter sends, with the submitter's rights and no other.
    own = KubernetesBackend(NAMESPACE, image=cluster.image)
    api = own._namespace().api
    api.access = replace(api.access, headers={"Impersonate-User": "grace"})
    spec = named("of-grace", resources={"queue": "express"})
    with cluster.held("express"):
        Client(own).submit(spec)
        until("it waits", lambda: Client(own).get(spec.name).stage is Stage.WAITING)
        assert Client(own).cancel(spec.name).phase is Phase.ABORTED


def test_pods_that_pretend_to_be_of_a_jobset_are_refused(cluster, runs):
    labels = {"jobset.sigs.k8s.io/jobset-name": "mine"}
    container = {"name": "c", "image": cluster.image, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod = {"metadata": {"labels": labels}, "spec": {"restartPolicy": "Never", "containers": [container]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}, "spec": {"template": pod}}
    with pytest.raises(ApiError, match="is that of a JobSet's pods; leave it out"):
        runs.backend._namespace().api.request("POST", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", job)
    spec = named("without-a-queue", resources={"queue": "research"})
    body = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": spec.name},
        "spec": {"replicatedJobs": [{"name": "w", "template": {"spec": {"template": {"spec": pod["spec"]}}}}]},
    }  # fmt: skip
    with pytest.raises(ApiError, match="a training job has to name a queue of its namespace"):
        runs.backend._send("POST", "", body)
