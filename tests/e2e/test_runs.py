"""A run of two pods on a cluster, what it leaves, and what may happen to it on the way.

Most tests disturb a run of their own in the middle of its training. It has to end all the same, with the losses of the
undisturbed one bit for bit: on CPUs the same processes compute the same, whenever they are started. All runs share a
queue that has room for one of them, and wait for each other there: tests do not wait for the undisturbed one before
they need what it left.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from safetensors.torch import load_file

from tasks.runtime.run_folder.record import CompletionRecord
from tests.e2e.helpers.cluster import MIDDLE, NAMESPACE, SPEC, SUCCEEDED, until

slow = pytest.mark.slow
STEPS = SPEC["training"]["steps"]


def ends_like(run, undisturbed):
    """The run succeeded, did its steps, and has the losses of the other one."""
    undisturbed.wait()
    run.wait()
    record = run.record()
    assert (record.status, record.steps) == ("complete", record.steps_asked)
    assert run.losses() == undisturbed.losses()
    return record


def test_it_is_a_job_of_two_pods_that_its_queue_admits(undisturbed):
    job = until("there is a training job", lambda: undisturbed.jobs() and undisturbed.job())
    workers = job["spec"]["pytorchReplicaSpecs"]
    assert list(workers) == ["Worker"] and workers["Worker"]["replicas"] == 2
    assert workers["Worker"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    asked = undisturbed.spec.resources
    labels = {"kueue.x-k8s.io/queue-name": asked.queue, "kueue.x-k8s.io/priority-class": asked.priority}
    assert labels.items() <= job["metadata"]["labels"].items()
    until("it is admitted", lambda: "Admitted" in undisturbed.conditions())


def comes_back(run, undisturbed):
    """It goes on by itself, in the same attempt: giving way is no failure, and spends none of those that a run has."""
    assert ends_like(run, undisturbed).restarts == 1
    assert run.attempt() == 0


def test_a_run_gives_way_to_an_urgent_pod(preempted, undisturbed):
    comes_back(preempted.run, undisturbed)


@slow
def test_a_run_gives_way_to_an_urgent_run(cluster, undisturbed):
    with cluster.held("express"):
        one_pod = {"topology": {"nnodes": 1}, "parallel": {"type": "single"}, "training": {"steps": 2}}
        asked = {"queue": "express", "priority": "urgent", "cpu": "1600m"}
        urgent = cluster.submit("urgent", **one_pod, checkpoint={"every": 2}, resources=asked)
        # Its pod is there and waits, so that it comes in the middle of the other's training and not when that is over.
        until("the urgent run waits", lambda: [pod for pod in urgent.pods("dn0") if pod.spec.scheduling_gates])
        run = cluster.submit("preempted")
        run.until_step(MIDDLE)
    run.until_suspended()
    urgent.wait()
    assert urgent.record().status == "complete"
    comes_back(run, undisturbed)


def test_it_leaves_a_model_a_report_and_a_record(undisturbed):
    undisturbed.wait()
    record = undisturbed.record()
    assert (record.status, record.steps, record.restarts, record.world_size) == ("complete", STEPS, 0, 2)
    assert record.eval_loss_after < record.eval_loss_before
    assert record.train_loss == undisturbed.losses()[STEPS][0]
    model = Path(undisturbed.output("model", FlyteDirectory).download())
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    assert all(weight.isfinite().all() for weight in load_file(model / "model.safetensors").values())
    report = Path(undisturbed.output("report", FlyteFile).download())
    assert "<svg" in report.read_text()


def delete_worker(number):
    """Its pod is deleted, as when a machine is taken away with notice."""

    def delete(cluster, run):
        cluster.core.delete_namespaced_pod(run.pods(f"worker-{number}")[0].metadata.name, NAMESPACE)

    return delete


def delete_evaluation(cluster, run):
    """The pod that comes after those of training is deleted, while it works."""
    (pod,) = until("it is evaluated", lambda: [p for p in run.pods("-dn1-") if p.status.phase == "Running"])
    cluster.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE)


def drain(cluster, run):
    """What `kubectl drain` does to the run, on the node of one of its pods; then the node is back."""
    node = run.pods("worker-1")[0].spec.node_name
    cluster.core.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        gone = [pod.metadata.name for pod in run.pods("worker") if pod.spec.node_name == node]
        for name in gone:
            cluster.core.create_namespaced_pod_eviction(name, NAMESPACE, {"metadata": {"name": name}})
        until("its pods are gone", lambda: not any(cluster.is_running(name) for name in gone))
    finally:
        cluster.core.patch_node(node, {"spec": {"unschedulable": None}})


def restart_operator(cluster, run):
    """The next one finds the job as it is."""
    cluster.restart("kubeflow", "training-operator")


def cut_store(cluster, run):
    """For a minute nobody reaches the object store, in which training ends and its weights are to be handed on."""
    subprocess.run(os.environ["STRATA_E2E_STORE_OFF"], shell=True, check=True, timeout=30)
    try:
        time.sleep(60)
    finally:
        subprocess.run(os.environ["STRATA_E2E_STORE_ON"], shell=True, check=True, timeout=30)


@slow
def test_a_finished_run_gets_more_steps(cluster):
    one_pod = {"topology": {"nnodes": 1}, "parallel": {"type": "single"}}
    constant = {"type": "constant", "warmup_steps": 1}
    first = cluster.submit("longer", **one_pod, training={"steps": 3}, checkpoint={"every": 3}, schedule=constant)
    first.wait()
    longer = first.spec.model_copy(update={"training": first.spec.training.model_copy(update={"steps": 5})})
    run = cluster.execute(longer)
    run.wait()
    record = run.record()
    assert (record.status, record.steps, record.restarts) == ("complete", 5, 1)
    assert [point["step"] for point in run.points() if "loss" in point] == [1, 2, 3, 4, 5]


@slow
def test_a_run_out_of_time_is_saved_and_not_retried(cluster):
    run = cluster.submit(
        "limited", training={"steps": 10_000}, checkpoint={"every": 10_000}, resources={"time_limit": 20}
    )
    job = until("there is a training job", lambda: run.jobs() and run.job())
    # Kueue would end an attempt that does not end itself.
    assert job["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "3620"
    (limit,) = until("it has a workload", lambda: [w["spec"]["maximumExecutionTimeSeconds"] for w in run.workloads()])
    assert limit == 3620
    run.until_done()
    assert "resources.time_limit: 20 s of training are used up" in run.error()
    assert len(run.jobs()) == 1
    saved = cluster.window("ls", f"{run.spec.output}/{run.spec.name}/checkpoints").split()
    # Of the notice, two seconds before the end, and of the end.
    assert len(saved) == 2 and run.points()[-1]["step"] < 10_000


@slow
def test_of_two_executions_of_one_run_one_trains(cluster):
    """Where the file system passes no locks on, the lease of the folder keeps the pods of the other one out."""
    one_pod = {"topology": {"nnodes": 1}, "parallel": {"type": "single"}, "training": {"steps": 10_000}}
    first = cluster.submit("locked", **one_pod, checkpoint={"every": 10_000})
    first.until_step(2)
    (pod,) = [pod.metadata.name for pod in first.pods() if cluster.is_running(pod.metadata.name)]
    cluster.window("rm", f"{first.spec.output}/{first.spec.name}/.lock")
    # As from Flyte's console: the client would refuse it.
    second = cluster.execute(first.spec)
    second.until_done()
    assert "is being trained by process" in second.error() and f"on {pod};" in second.error()
    step = first.points()[-1]["step"]
    first.until_step(step + 2)
    cluster.until_settled(first.id)
    cluster.remote.terminate(cluster.remote.fetch_execution(name=first.id), "tested")


# Until which step nothing happens; what does; whether training starts again.
DISTURBANCES = {
    "a-pod-is-deleted": (MIDDLE, delete_worker(1), True),
    "the-main-pod-is-deleted": (MIDDLE, delete_worker(0), True),
    "the-node-is-drained": (MIDDLE, drain, True),
    "the-pod-that-evaluates-is-deleted": (STEPS, delete_evaluation, False),
    "the-operator-restarts": (MIDDLE, restart_operator, False),
    "the-store-is-away": (MIDDLE, cut_store, False),
}


@slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_run_outlives_what_happens_to_a_cluster(cluster, undisturbed, disturbance):
    step, disturb, starts_again = DISTURBANCES[disturbance]
    if disturb is cut_store and "STRATA_E2E_STORE_OFF" not in os.environ:
        pytest.skip("STRATA_E2E_STORE_OFF has no command that cuts the object store off")
    run = cluster.submit("disturbed")
    run.until_step(step)
    disturb(cluster, run)
    assert (ends_like(run, undisturbed).restarts > 0) == starts_again


# The last one, because a flyteadmin that keeps all in its memory knows nothing afterwards.
@slow
def test_a_run_outlives_a_restart_of_flyte(cluster, undisturbed):
    undisturbed.wait()
    run = cluster.submit("disturbed")
    run.until_step(MIDDLE)
    cluster.restart("strata-system", "flyte-binary")
    phase = until("the workflow has ended", run.phase)
    kept = cluster.kept(run.id)["status"]
    # What such a flyteadmin has forgotten, propeller calls failed when all of it is done.
    assert phase == "succeeded" or kept["error"]["code"] == "ExecutionNotFound"
    assert {node["phase"] for node in kept["nodeStatus"].values()} == {SUCCEEDED}
    record = CompletionRecord.model_validate_json(run.file("record.json"))
    assert (record.status, record.steps, record.restarts) == ("complete", STEPS, 0)
    assert run.losses() == undisturbed.losses()
