"""Runs without Flyte: JobSets that Kubernetes, JobSet's controller and Kueue start, repeat and end."""

import json
import subprocess
from dataclasses import replace

import pytest
from kubernetes import client

from strata_platform.backends.job_set import job_set
from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.backends.kubernetes_objects import WORKLOADS, is_of
from strata_platform.backends.local import LocalBackend
from strata_platform.client import Client
from strata_platform.errors import RunExists
from strata_platform.kubernetes_api import ApiError
from strata_platform.pod_settings import PRIORITY, QUEUE, TIME_LIMIT
from strata_platform.runs import Phase, Stage
from tests.e2e.helpers.cluster import MIDDLE, NAMESPACE, PATIENCE, SPEC, beside, named, until

STEPS = SPEC["training"]["steps"]
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", NAMESPACE, "jobsets")


@pytest.fixture(scope="module")
def runs(cluster):
    try:
        cluster.custom.list_namespaced_custom_object(*JOBSETS)
    except client.ApiException as error:
        assert error.status == 404
        pytest.skip("the cluster has no JobSet; docs/cluster-tests.md")
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
def killed(cluster, runs):
    """A run that loses a pod in the middle of its training: its spec, its end, and the lines of its log."""
    spec = named("killed")
    runs.submit(spec)
    lines = beside(lambda: list(runs.logs(spec.name, follow=True)))
    until_step(cluster, runs, spec, MIDDLE)
    chosen = f"strata/run={spec.name},batch.kubernetes.io/job-completion-index=1"
    (pod,) = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=chosen).items
    cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE, grace_period_seconds=0)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    return spec, ended, lines.result(60)


def test_a_lost_pod_costs_the_steps_since_the_checkpoint_and_no_bit(cluster, undisturbed, killed):
    spec, ended, lines = killed
    assert (ended.phase, ended.restarts, ended.step) == (Phase.SUCCEEDED, 1, STEPS), ended.message
    # With Flyte or without, the same processes compute the same.
    undisturbed.wait()
    assert losses(cluster, spec) == undisturbed.losses()
    # The log has both attempts, of both ranks.
    assert {line.attempt for line in lines} == {0, 1} and {line.rank for line in lines} >= {0, 1}
    assert first_again(cluster, spec) > 1


def first_again(cluster, spec):
    """The first step of the second attempt, which follows a checkpoint."""
    step = next(point["step"] for point in points(cluster, spec) if point["attempt"] == 1)
    assert step % SPEC["checkpoint"]["every"] == 1
    return step


def test_a_run_is_prepared_trained_evaluated_and_exported(cluster, runs, killed):
    spec, ended, _ = killed
    assert (ended.step, ended.steps) == (STEPS, STEPS)
    # Of the pods that are left, those of the last attempt.
    assert {point.step for point in runs.metrics(spec.name)} == set(range(first_again(cluster, spec), STEPS + 1))
    text = [line.text for line in runs.logs(spec.name)]
    assert any(line.startswith("validation loss") for line in text) and not any("@strata" in line for line in text)
    events = runs.events(spec.name)
    assert {"Submitted", "Admitted", "Scheduled", "Succeeded"} <= {event.reason for event in events}
    # Its second start kept the quota of the first.
    phases = [event.message.partition(":")[0] for event in events if event.reason == "Startup"]
    assert phases[:4] == ["scheduler", "volumes", "image", "container"] and phases[-1] == "second step"
    outputs = runs.outputs(spec.name)
    assert "config.json" in cluster.window("ls", outputs.model)
    assert json.loads(cluster.window("cat", outputs.record))["status"] == "complete"
    (listed,) = [run for run in runs.list() if run.name == spec.name]
    assert listed.phase is Phase.SUCCEEDED


def test_what_lost_and_removed_pods_said_stays_readable(cluster, runs, tmp_path):
    spec = named("lost-log")
    runs.submit(spec)
    until_step(cluster, runs, spec, MIDDLE)
    mine = f"strata/run={spec.name}"
    chosen = f"{mine},batch.kubernetes.io/job-completion-index=0"
    (pod,) = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=chosen).items
    cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE)
    until("the next attempt trains", lambda: any(point["attempt"] == 1 for point in points(cluster, spec)))

    # This machine does not mount the volume: the present pod of rank 0 repeats it.
    lines = list(runs.logs(spec.name))
    lost = [line for line in lines if line.kept]
    assert {line.attempt for line in lost} == {0} and any(line.text.startswith("step ") for line in lost)
    assert {line.attempt for line in lines if not line.kept} == {1}
    assert [line.time for line in lines] == sorted(line.time for line in lines)

    assert runs.wait(spec.name, timeout=PATIENCE).phase is Phase.SUCCEEDED
    cluster.core.delete_collection_namespaced_pod(NAMESPACE, label_selector=mine)
    until("its pods are removed", lambda: not cluster.core.list_namespaced_pod(NAMESPACE, label_selector=mine).items)
    logs = f"{spec.output}/{spec.name}/logs"
    (tmp_path / "logs").mkdir()
    for name in cluster.window("ls", logs).split():
        (tmp_path / "logs" / name).write_text(cluster.window("cat", f"{logs}/{name}"))
    kept = list(Client(LocalBackend(tmp_path / "names")).logs(str(tmp_path)))
    assert {line.attempt for line in kept} == {0, 1} and any("validation loss" in line.text for line in kept)
    assert len({(line.kept, line.time, line.rank, line.text) for line in kept}) == len(kept)


def test_a_run_that_has_succeeded_is_not_started_again(cluster, runs, killed):
    spec, ended, _ = killed
    again = runs.submit(spec)
    assert (again.phase, again.where) == (Phase.SUCCEEDED, ended.where)
    jobs = cluster.custom.list_namespaced_custom_object(*JOBSETS, label_selector=f"strata/run={spec.name}")
    assert len(jobs["items"]) == 1


@pytest.mark.slow
def test_a_run_that_no_quota_can_admit_any_more_is_ended(cluster, runs):
    spec = named("shrunk-alone", resources={"queue": "express"})
    cluster.end_without_quota(runs, spec)


def test_a_canceled_run_gives_its_machines_to_the_next_and_is_continued(cluster, runs, undisturbed):
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
    undisturbed.wait()
    assert losses(cluster, spec) == undisturbed.losses()


def test_of_two_submissions_at_once_one_trains(cluster, runs):
    spec = named("twin-alone")

    def submit():
        try:
            return Client(KubernetesBackend(NAMESPACE, image=cluster.image)).submit(spec)
        except RunExists as error:
            return error

    results = [each.result(PATIENCE) for each in [beside(submit), beside(submit)]]
    assert sorted(isinstance(result, RunExists) for result in results) == [False, True]
    assert runs.cancel(spec.name).phase is Phase.ABORTED


def test_a_mistake_in_the_spec_ends_the_run_at_once_with_its_sentence(cluster, runs):
    # As written: the spec travels in a variable, of whose text Kubernetes replaces $$ and $(NAME).
    source = "/runs/$$nowhere-$(MASTER_PORT).jsonl"
    spec = named("mistake", data={"source": source})
    runs.submit(spec)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts) == (Phase.FAILED, 0)
    assert f"data.source: there is no such file on this machine; given: {source!r}" in ended.message


def test_members_see_runs_and_only_submitters_start_and_cancel_them(cluster, runs):
    def may(user, verb, resource, group):
        command = ["kubectl", "auth", "can-i", verb, f"{resource}.{group}", "-n", NAMESPACE, f"--as={user}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() == "yes"

    for verb, ada, grace in (
        ("list", True, True),
        ("create", False, True),
        ("patch", False, True),
        ("delete", False, False),
    ):
        assert may("ada", verb, "jobsets", "jobset.x-k8s.io") is ada
        assert may("grace", verb, "jobsets", "jobset.x-k8s.io") is grace
    assert not may("ada", "patch", "workloads", "kueue.x-k8s.io")


@pytest.fixture
def of_grace(cluster, runs):
    """A run of a submitter's that waits, with the backend that has the submitter's rights and no other."""
    own = KubernetesBackend(NAMESPACE, image=cluster.image)
    api = own._namespace().api
    api.access = replace(api.access, headers={"Impersonate-User": "grace"})
    spec = named("of-grace", resources={"queue": "express"})
    with cluster.held("express"):
        Client(own).submit(spec)
        until("it waits", lambda: Client(own).get(spec.name).stage is Stage.WAITING)
        yield own, spec.name
        assert Client(own).cancel(spec.name).phase is Phase.ABORTED


def of_job(own, name):
    return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets/{name}"


def of_workload(own, name):
    uid = own._fetch(name)["metadata"]["uid"]
    (workload,) = [each for each in own._namespace().list(WORKLOADS) if is_of(each, {uid})]
    return f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads/{workload['metadata']['name']}"


# Ways around the queue, and the words that refuse them.
AROUND = [
    (of_job, {"metadata": {"labels": {QUEUE: None}}}, "has to name a queue of its namespace"),
    (of_job, {"metadata": {"labels": {QUEUE: "rival"}}}, "has to name a queue of its namespace"),
    (of_job, {"spec": {"suspend": False}}, "its queue resumes it"),
    (of_job, {"metadata": {"labels": {PRIORITY: "urgent"}}}, "the priority that it was submitted with"),
    (of_workload, {"spec": {"priority": 10**6}}, "only spec.active of a workload may be changed"),
]


def test_a_run_that_waits_starts_by_its_queue_alone(of_grace):
    own, name = of_grace
    for path, change, reason in AROUND:
        with pytest.raises(ApiError, match=reason):
            own._namespace().api.request("PATCH", path(own, name), change)
    api, path = own._namespace().api, of_workload(own, name)
    fewer = [each | {"count": 1} for each in api.get(path)["spec"]["podSets"]]
    with pytest.raises(ApiError, match=r"only spec\.active of a workload"):
        api.request("PATCH", path, {"spec": {"podSets": fewer}})


def test_a_run_belongs_to_whoever_submitted_it(of_grace):
    own, name = of_grace
    assert Client(own).get(name).owner == "grace"
    body = own._fetch(name)
    labels = body["metadata"]["labels"] | {"strata/owner": "ada"}
    forged = {"metadata": {"name": f"{name}-forged", "labels": labels}, "spec": body["spec"]}
    with pytest.raises(ApiError, match='the label strata/owner is "ada"; it is that of whoever submits'):
        own._send("POST", "", {"apiVersion": body["apiVersion"], "kind": "JobSet", **forged})
    with pytest.raises(ApiError, match='that of whoever submits the run, "grace", and stays'):
        own._send("PATCH", f"/{name}", {"metadata": {"labels": {"strata/owner": "ada"}}})


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


@pytest.mark.slow
def test_a_run_out_of_time_is_saved_and_not_retried(cluster, runs):
    limit = {"training": {"steps": 10_000}, "checkpoint": {"every": 10_000}, "resources": {"time_limit": 20}}
    spec = named("limited-alone", **limit)
    runs.submit(spec)
    job = runs.backend._newest(spec.name)
    assert job["metadata"]["labels"][TIME_LIMIT] == "3620"
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert (ended.phase, ended.restarts) == (Phase.FAILED, 0)
    assert "resources.time_limit: 20 s of training are used up" in ended.message
    saved = cluster.window("ls", f"{spec.output}/{spec.name}/checkpoints").split()
    # Of the notice, two seconds before the end, and of the end.
    assert len(saved) == 2 and points(cluster, spec)[-1]["step"] < 10_000


@pytest.mark.slow
def test_kueue_ends_a_run_that_holds_its_machines_for_too_long(cluster, runs):
    spec = named("held-too-long", resources={"time_limit": 60})
    template, image = runs.backend._template("strata")
    body = job_set(spec.name, spec, template, image, runs.backend.me(), "submission")
    # In place of an hour more than the limit.
    body["metadata"]["labels"][TIME_LIMIT] = "5"
    runs.backend._send("POST", "", body)
    ended = runs.wait(spec.name, timeout=PATIENCE)
    assert ended.phase is Phase.FAILED and "held its machines for longer than resources.time_limit" in ended.message
    (listed,) = [run for run in runs.list() if run.name == spec.name]
    assert listed.phase is Phase.FAILED
    # It may be submitted again.
    assert runs.submit(spec).where.endswith("-x2")
    assert runs.cancel(spec.name).phase is Phase.ABORTED
