"""A run of two pods on a cluster, what it leaves, and what may happen to it on the way.

Most tests disturb a run of their own in the middle of its training. It has to end all the same, with the losses of the
undisturbed one bit for bit: on CPUs the same processes compute the same, whenever they are started. All runs share a
queue that has room for one of them, and wait for each other there: tests do not wait for the undisturbed one before
they need what it left.
"""

import json
from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from safetensors.torch import load_file

from tests.e2e.cluster import QUEUES, until

# Between two checkpoints, so that steps are lost and done once more.
MIDDLE = 15
slow = pytest.mark.slow


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
    asked = undisturbed.spec.resources
    labels = {"kueue.x-k8s.io/queue-name": asked.queue, "kueue.x-k8s.io/priority-class": asked.priority}
    assert labels.items() <= job["metadata"]["labels"].items()
    until("it is admitted", lambda: "Admitted" in undisturbed.conditions())
    until("both pods run", lambda: [pod.status.phase for pod in undisturbed.pods("worker")] == ["Running"] * 2)
    assert all(pod.spec.security_context.run_as_non_root for pod in undisturbed.pods("worker"))


def gives_way(run):
    """The run is suspended by its queue."""
    until("it is suspended", lambda: run.job()["spec"]["runPolicy"].get("suspend"))
    assert run.conditions()["Evicted"] == "Preempted"
    until("its pods are gone", lambda: not run.pods("worker"))


def comes_back(run, undisturbed):
    """It goes on by itself, in the same attempt: giving way is no failure, and spends none of those that a run has."""
    assert ends_like(run, undisturbed).restarts == 1
    assert run.attempt() == 0


def test_a_run_gives_way_to_an_urgent_pod(cluster, undisturbed):
    run = cluster.submit("preempted")
    run.until_step(MIDDLE)
    # What Flyte makes of a task with resources.priority, without the task.
    with cluster.pod(["sleep", "86400"], queue="research", priority="urgent", cpu="1600m") as urgent:
        gives_way(run)
        until("the urgent pod runs", lambda: cluster.is_running(urgent))
    comes_back(run, undisturbed)


@slow
def test_a_run_gives_way_to_an_urgent_run(cluster, undisturbed):
    door = (*QUEUES, "express")
    cluster.custom.patch_namespaced_custom_object(*door, {"spec": {"stopPolicy": "Hold"}})
    one_pod = {"topology": {"nnodes": 1}, "parallel": {"type": "single"}, "training": {"steps": 2}}
    asked = {"queue": "express", "priority": "urgent", "cpu": "1600m"}
    urgent = cluster.submit("urgent", **one_pod, checkpoint={"every": 2}, resources=asked)
    # Its pod is there and waits, so that it comes in the middle of the other's training and not when that is over.
    until("the urgent run waits", lambda: [pod for pod in urgent.pods("dn0") if pod.spec.scheduling_gates])
    run = cluster.submit("preempted")
    run.until_step(MIDDLE)
    cluster.custom.patch_namespaced_custom_object(*door, {"spec": {"stopPolicy": "None"}})
    gives_way(run)
    urgent.wait()
    assert urgent.record().status == "complete"
    comes_back(run, undisturbed)


def test_it_leaves_a_model_a_report_and_a_record(undisturbed):
    undisturbed.wait()
    record = undisturbed.record()
    assert (record.status, record.steps, record.restarts, record.world_size) == ("complete", 40, 0, 2)
    assert record.eval_loss_after < record.eval_loss_before
    assert record.train_loss == undisturbed.losses()[40][0]
    model = Path(undisturbed.output("model", FlyteDirectory).download())
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    assert all(weight.isfinite().all() for weight in load_file(model / "model.safetensors").values())
    report = Path(undisturbed.output("report", FlyteFile).download())
    assert "<svg" in report.read_text()
