"""The client over Flyte: what it makes of real messages, and of what a gRPC and an HTTP server answer.

Whole runs on a cluster are in tests/e2e.
"""

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import grpc
import msgpack
import pytest
from flyteidl.core import execution_pb2 as core_pb2
from flyteidl.core import literals_pb2
from typer.testing import CliRunner

from strata_platform import kept_log, progress_line
from strata_platform.backends.api_errors import translate
from strata_platform.backends.flyte import FlyteBackend
from strata_platform.backends.flyte_messages import PHASES, error_text, spec_inputs
from strata_platform.backends.kubernetes_objects import Namespace, RunStatus, status_of
from strata_platform.backends.pod_logs import TimeOrderedLines, line_of
from strata_platform.chart import queue_timeout
from strata_platform.cli import app
from strata_platform.client import prices_of_cluster
from strata_platform.errors import BackendError, NotReady, Refused, RunExists, RunNotFound, SpecError, Unreachable
from strata_platform.estimate import Prices
from strata_platform.kubernetes_api import ApiError
from strata_platform.runs import LogLine, Phase, Stage
from strata_platform.spec import RunSpec
from tests.platform.helpers.servers import NAMESPACE, TRAIN, pod, pods_of, workload

RESERVED = {"QuotaReserved": {"status": "True"}, "Admitted": {"status": "True"}}
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]
BACK_OFF = [{"name": "c", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
             "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]  # fmt: skip


# As pkg/scheduler/flavorassigner of Kueue 0.19 says it.
TOO_LARGE = (
    "insufficient quota for cpu in flavor one, previously considered podsets requests (0) + current podset request (9) "
    "> maximum capacity (4)"
)
IN_USE = "insufficient unused quota for cpu in flavor two, 1 more needed"


@pytest.mark.parametrize(
    ("pods", "workloads", "expected"),
    [
        ([], [], RunStatus(Stage.STARTING)),
        (
            [],
            [
                workload("later", created="2026-11-22T00:00:01Z"),
                workload("mine", QuotaReserved={"status": "False", "message": "insufficient quota"}),
                workload("urgent", priority=10, created="2026-11-22T00:00:09Z"),
                workload("older", created="2026-11-21T00:00:00Z"),
                workload("admitted", priority=10, **RESERVED),
                workload("elsewhere", queue="other", priority=10),
            ],
            RunStatus(Stage.WAITING, "insufficient quota", "research", 2),
        ),
        (
            [],
            [workload("mine", QuotaReserved={"status": "False", "message": TOO_LARGE})],
            RunStatus(Stage.WAITING, f"no quota is large enough, so it waits for ever; cancel it and ask for less "
                      f"({TOO_LARGE})", "research", 0),
        ),
        (
            [],
            [workload("mine", QuotaReserved={"status": "False", "message": f"{TOO_LARGE}, {IN_USE}"})],
            RunStatus(Stage.WAITING, f"{TOO_LARGE}, {IN_USE}", "research", 0),
        ),
        (
            [],
            [workload("mine", Evicted={"status": "True", "reason": "Preempted", "message": "by another"})],
            RunStatus(Stage.WAITING, "Preempted: by another", "research", 0),
        ),
        ([pod("a", phase="Pending", conditions=UNSCHEDULABLE)], [workload("uid-a", **RESERVED)],
         RunStatus(Stage.ADMITTED, "a: 0/1 nodes are available")),
        ([pod("a", phase="Pending") | {"spec": {"containers": [], "schedulingGates": [{"name": "kueue"}]}}], [],
         RunStatus(Stage.WAITING)),
        ([pod("a"), pod("b", phase="Pending")], [], RunStatus(Stage.PULLING)),
        ([pod("a", phase="Pending") | {"status": {"phase": "Pending", "containerStatuses": BACK_OFF}}], [],
         RunStatus(Stage.PULLING, "a: ImagePullBackOff: no such image")),
        ([pod("p", "tasks-prepare-prepare")], [], RunStatus(Stage.PREPARING)),
        ([pod("p", "tasks-prepare-prepare", "Succeeded"), pod("a")], [], RunStatus(Stage.STARTING)),
        ([pod("s", "workflows-finetune-start")], [], RunStatus(Stage.PREPARING)),
        ([pod("e", "tasks-finish-finish")], [workload("x", Finished={"status": "True"})],
         RunStatus(Stage.EVALUATING)),
    ],
    ids=["nothing yet", "in the queue", "too large", "too large for one flavor", "evicted", "no node",
         "held back", "one of two", "no image", "prepares",
         "starts", "plans", "evaluates"],
)  # fmt: skip
def test_where_a_run_is(kubernetes, pods, workloads, expected):
    assert status_of(pods_of(kubernetes, *pods), workloads, {"mine", "uid-a"}) == expected


def test_a_run_that_no_quota_admits_is_ended_after_the_time_it_may_wait(client, admin, kubernetes, monkeypatch):
    for name in ("large", "new", "busy"):
        admin.add(name, core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content["pods"] = [
        pod(name) | {"metadata": pod(name)["metadata"] | {"uid": name, "labels": {"execution-id": name}}}
        for name in ("large", "new", "busy")
    ]
    since = {"large": "2026-11-22T00:00:00Z", "new": "2026-11-22T01:30:00Z", "busy": "2026-11-22T00:00:00Z"}
    waiting = [
        workload(
            name,
            QuotaReserved={
                "status": "False",
                "message": IN_USE if name == "busy" else TOO_LARGE,
                "lastTransitionTime": at,
            },
        )
        for name, at in since.items()
    ]
    kubernetes.content["workloads"] = (200, waiting)
    monkeypatch.setenv("FLYTE_PLATFORM_URL", client.backend._config.endpoint)
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    tenant = {"namespace": NAMESPACE, "project": "flytesnacks", "domain": "development", "job_sets": False}
    settings = queue_timeout.Settings.model_validate({"after": "2h", "flyte": True, "tenants": [tenant]})
    (said,) = queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, 3, tzinfo=UTC))
    assert said.startswith("flytesnacks-development: large is ended: no quota of queue research is large enough")
    assert "queues.timeout.after, 2h" in said and TOO_LARGE in said
    assert [client.get(name).phase for name in since] == [Phase.ABORTED, Phase.QUEUED, Phase.QUEUED]


# As Kueue 0.19 makes it of its reason "Deactivated" and the cause.
OVER_TIME = "DeactivatedDueToMaximumExecutionTimeExceeded"
GIVEN_UP = "DeactivatedDueToRequeuingLimitExceeded"


def test_a_run_that_kueue_has_taken_out_of_its_queue_is_ended(client, admin, kubernetes, monkeypatch):
    """As it does after `resources.time_limit` and an hour: nothing activates it again."""
    admin.add("slow", core_pb2.WorkflowExecution.RUNNING)
    owner = pod("slow")
    owner["metadata"] |= {"uid": "slow", "labels": {"execution-id": "slow"}}
    kubernetes.content["pods"] = [owner]
    lost = {"status": "False", "message": "deactivated", "lastTransitionTime": "2026-11-22T00:00:00Z"}
    evicted = {"status": "True", "reason": OVER_TIME, "message": "exceeding the maximum execution time"}
    inactive = workload("slow", QuotaReserved=lost, Evicted=evicted)
    inactive["spec"]["active"] = False
    paused = workload("slow", QuotaReserved=lost, Evicted=evicted | {"reason": "Deactivated"})
    paused["spec"]["active"] = False
    kubernetes.content["workloads"] = (200, [paused])
    monkeypatch.setenv("FLYTE_PLATFORM_URL", client.backend._config.endpoint)
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    tenant = {"namespace": NAMESPACE, "project": "flytesnacks", "domain": "development", "job_sets": False}
    settings = queue_timeout.Settings.model_validate({"after": "2h", "flyte": True, "tenants": [tenant]})
    # Somebody else has: it goes on when they say so.
    assert not list(queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, 3, tzinfo=UTC)))
    kubernetes.content["workloads"] = (200, [inactive])
    assert "Kueue has given it up, so it waits for ever: cancel it" in client.get("slow").message
    (said,) = queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, 3, tzinfo=UTC))
    assert "exceeding the maximum execution time" in said and "raise resources.time_limit" in said
    assert client.get("slow").phase is Phase.ABORTED
    # Also where its pods did not start.
    inactive["status"]["conditions"][1] |= {"reason": GIVEN_UP, "message": "exceeding the maximum number of retries"}
    (said,) = queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, 3, tzinfo=UTC))
    assert "exceeding the maximum number of retries); look at the events of its pods" in said


def test_a_run_that_cannot_be_ended_keeps_no_other_from_it(client, kubernetes, monkeypatch):
    monkeypatch.setenv("FLYTE_PLATFORM_URL", client.backend._config.endpoint)
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    ended = []

    def terminate(self, execution, cause):
        if execution == "stubborn":
            raise BackendError("Flyte does not answer")
        ended.append(execution)

    def hopeless(self, before):
        if self.namespace == "gone":
            raise BackendError("no such namespace")
        return {name: workload(name, QuotaReserved={"message": TOO_LARGE}) for name in ("stubborn", "large")}

    monkeypatch.setattr(queue_timeout.FlyteAdmin, "terminate", terminate)
    monkeypatch.setattr(queue_timeout.Namespace, "hopeless", hopeless)
    tenants = [{"namespace": name, "project": "p", "domain": "d", "job_sets": False} for name in ("gone", "team")]
    settings = queue_timeout.Settings.model_validate({"after": "2h", "flyte": True, "tenants": tenants})
    with pytest.raises(BackendError, match="no such namespace; Flyte does not answer"):
        list(queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, 3, tzinfo=UTC)))
    assert ended == ["large"]


def test_a_submission_between_the_look_and_the_execution_of_another_takes_the_name(client, admin, monkeypatch):
    admin.active = "v1"
    find, looks = FlyteBackend._find, []

    def found_and_overtaken(self, name):
        execution = find(self, name)
        looks.append(name)
        if len(looks) == 1:
            admin.add("run", core_pb2.WorkflowExecution.RUNNING, label="run", owner="ada")
        return execution

    monkeypatch.setattr(FlyteBackend, "_find", found_and_overtaken)
    with pytest.raises(RunExists, match="has not ended, as execution run of ada"):
        client.submit(RunSpec(name="run"))
    assert list(admin.executions) == ["run"]


def test_lines_have_the_rank_that_they_tell_or_that_of_their_pods_first_process(kubernetes):
    worker, single, other = pods_of(
        kubernetes, pod("w", replica=3), pod("s", "tasks-topology-train-1x1"), pod("p", "workflows-finetune-start")
    )
    stamp = "2026-11-22T00:00:01.500000000Z"
    time = datetime(2026, 11, 22, 0, 0, 1, 500000, UTC).timestamp()
    assert line_of(worker, f"{stamp} [rank 7] a warning\n") == (stamp, LogLine(time, 7, "a warning", "w", 1))
    assert line_of(worker, f"{stamp} 0 %\r50 %\n")[1] == LogLine(time, 6, "50 %", "w", 1)
    assert line_of(single, f"{stamp} plain\n")[1].rank == 0
    assert line_of(other, f"{stamp} \n")[1] == LogLine(time, None, "", "p", 1)
    assert LogLine(time, None, "", "p").prefix == "[p]"


def test_stamps_of_all_zones_are_of_one_and_what_the_kubelet_says_has_none(kubernetes):
    (worker,) = pods_of(kubernetes, pod("w", replica=0))
    utc, line = line_of(worker, "2026-11-21T23:59:58.25Z one")
    east, later = line_of(worker, "2026-11-22T08:00:01.123456789+08:00 two")
    assert (utc, east) == ("2026-11-21T23:59:58.250000000Z", "2026-11-22T00:00:01.123456789Z")
    assert later.time - line.time == pytest.approx(2.873457, abs=1e-5)
    assert line_of(worker, "failed to create fsnotify watcher: too many open files") is None
    assert line_of(worker, "") is None


def test_lines_of_pods_come_out_in_the_order_of_time_however_they_came_in():
    merged = TimeOrderedLines()
    rounds = []
    for arrived in (["3", "1"], ["2", "5"], [], ["4", "6"], []):
        for stamp in arrived:
            merged.add(stamp, LogLine(0, 0, stamp))
        rounds.append([line.text for line in merged.release()])
    rounds.append([line.text for line in merged.release(last=True)])
    # 4 was said before 5, and came later than the round after it.
    assert rounds == [[], ["1", "2", "3"], ["5"], ["4"], ["6"], []]


@pytest.mark.parametrize(
    ("status", "kind", "reason"), [(403, Refused, "Forbidden"), (500, BackendError, "Internal Server Error")]
)
def test_what_kubernetes_refuses_keeps_its_status_and_its_words(kubernetes, status, kind, reason):
    kubernetes.content["workloads"] = (status, [])
    with pytest.raises(kind, match="Kubernetes refused to list workloads: you may not") as caught:
        Namespace(NAMESPACE).status("run", [])
    assert (caught.value.status, caught.value.reason) == (status, reason)


def test_a_cluster_without_kueue_and_without_the_operator_has_no_queue(kubernetes):
    kubernetes.content |= {"workloads": (404, []), "pytorchjobs": (404, [])}
    assert Namespace(NAMESPACE).status("run", pods_of(kubernetes, pod("a"))) == RunStatus(Stage.STARTING)


def test_every_phase_of_flyte_is_one_of_ours():
    assert set(PHASES) == set(core_pb2.WorkflowExecution.Phase.values())


def test_a_run_is_the_newest_of_its_executions(client, admin):
    admin.add("run", core_pb2.WorkflowExecution.FAILED, "run")
    admin.add("run-x2", core_pb2.WorkflowExecution.RUNNING, "run-x2")
    admin.add("run-x3", core_pb2.WorkflowExecution.SUCCEEDING, "run")
    admin.add("a1b2", core_pb2.WorkflowExecution.ABORTED)
    assert client.get("run").where.endswith("/run-x3")
    assert client.get("run-x2").where.endswith("/run-x2")
    # Started by others, without a label.
    assert client.get("a1b2").phase is Phase.ABORTED
    assert [(run.name, run.phase.value) for run in client.list()] == [
        ("a1b2", "aborted"), ("run", "running"), ("run-x2", "running"),
    ]  # fmt: skip
    with pytest.raises(RunNotFound, match="no run was submitted to flytesnacks-development as 'other'"):
        client.get("other")


def test_why_a_run_failed_is_told_without_its_trace(client, admin):
    admin.add(
        "run", core_pb2.WorkflowExecution.FAILED, error="Trace:\n\n    at x\n\nMessage:\n\n    ValueError: few rows"
    )
    assert client.wait("run").message == "ValueError: few rows"
    with pytest.raises(NotReady, match="run is failed"):
        client.outputs("run")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("[3/3] currentAttempt done.\nOOMKilled", "[3/3] currentAttempt done.\nOOMKilled"),
        ("\u256d frame \u256e\n\u2502 code\n\u2570 frame \u256f\nDownloadError: Access\n Denied.\n"
         '{"asctime": "2026", "message": "Unclosed"}\n', "DownloadError: Access\nDenied."),
    ],
    ids=["of a pod", "in a frame, before a log"],
)  # fmt: skip
def test_the_words_of_a_failure(message, said):
    assert error_text(message) == said


def test_a_run_is_canceled_once(client, admin):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    assert [client.cancel("run").phase, client.cancel("run").phase] == [Phase.ABORTED, Phase.ABORTED]
    assert admin.terminated == ["run"]


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, Refused, 403),
        (grpc.StatusCode.INTERNAL, BackendError, 500),
    ],
)
def test_what_flyte_refuses_keeps_its_status_and_its_words(client, admin, code, kind, status):
    admin.refusal, admin.refusals = (code, "not today"), 100
    with pytest.raises(kind, match="Flyte refused to look for run: not today") as caught:
        client.get("run")
    assert (caught.value.status, caught.value.reason) == (status, code.name)


def test_a_flyte_that_does_not_answer(client, admin):
    admin.stop()
    with pytest.raises(Unreachable) as caught:
        client.get("run")
    assert (caught.value.status, caught.value.reason) == (503, "UNAVAILABLE")


def test_who_waits_bears_that_flyte_is_away_for_a_while(client, admin, caplog, monkeypatch):
    admin.add("run", core_pb2.WorkflowExecution.FAILED)
    # A call is sent four times.
    admin.refusal, admin.refusals = (grpc.StatusCode.UNAVAILABLE, "starting"), 10
    assert client.wait("run").phase is Phase.FAILED
    assert caplog.messages == ["Flyte refused to look for run: starting; trying again"]
    monkeypatch.setattr("strata_platform.backends.backend.RETRY_SECONDS", 0.0)
    admin.refusals = 100
    with pytest.raises(Unreachable):
        client.wait("run")


def test_errors_of_kubernetes_without_a_body():
    error = translate(ApiError(500, "Internal Server Error", "Internal Server Error"), "to list pods")
    assert str(error) == "Kubernetes refused to list pods: Internal Server Error"


POINT = {"step": 4, "attempt": 1, "time": 0.0, "loss": 2.0, "learning_rate": 0.1, "grad_norm": None, "tokens": 1,
         "target_tokens": 1, "tokens_per_second": 8.0, "step_seconds": 3.0, "memory_bytes": 1}  # fmt: skip


def log_of(*lines, minute=0):
    stamped = (f"2026-11-22T00:{minute:02d}:{second:02d}.000000000Z {line}\n" for second, line in enumerate(lines))
    return "".join(stamped)


def test_an_execution_of_another_workflow_has_no_outputs(client, admin):
    """A sweep leaves a table and the best spec."""
    admin.add("sweep", core_pb2.WorkflowExecution.SUCCEEDED)
    admin.outputs["sweep"] = {"table": "file:///table.csv", "best": "file:///best.yaml"}
    run = client.wait("sweep")
    assert run.phase is Phase.SUCCEEDED
    assert "has no outputs model, report, record; it has best, table" in run.message
    with pytest.raises(BackendError, match="has no outputs model"):
        client.outputs("sweep")
    with pytest.raises(RunNotFound):
        client.get("")


def test_a_run_that_trains_tells_its_step_and_when_it_will_be_done(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content["pods"] = [pod("w0", replica=0), pod("w1", replica=1)]
    stage = progress_line.encode({"stage": "training", "steps": 10, "attempt": 1})
    kubernetes.content["logs"] = {
        "w0": [log_of("hello", stage, progress_line.encode({"point": POINT})), log_of("nothing new")]
    }
    run = client.get("run")
    assert (run.phase, run.stage, run.step, run.steps, run.restarts) == (Phase.RUNNING, Stage.TRAINING, 4, 10, 1)
    assert (run.loss, run.eta) == (2.0, 18.0)
    # What was told once is remembered.
    assert (client.get("run").stage, client.get("run").steps) == (Stage.TRAINING, 10)
    # Text of a data set, which is none of what a run tells.
    kubernetes.content["logs"]["w0"] = [log_of('@strata {"stage": "boom"}', '@strata {"point": 4}')]
    assert (client.get("run").stage, client.get("run").steps) == (Stage.TRAINING, 10)
    # The pod that comes after has not told anything yet; one that is not there yet is waited for.
    kubernetes.content["pods"] = [pod("again", replica=0)]
    kubernetes.content["logs"] = {"again": [log_of("hello")]}
    assert client.get("run").stage is Stage.STARTING
    kubernetes.content["logs"]["again"] = [log_of(progress_line.encode({"stage": "warming up kernels"}))]
    assert client.get("run").stage is Stage.WARM_UP
    kubernetes.content["pods"].append(pod("w1", phase="Pending", replica=1))
    assert client.get("run").stage is Stage.PULLING


def test_all_pods_are_followed_over_lost_connections_and_preemptions_to_the_end(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    lines = [f"w0 line {number}" for number in range(4)]
    kubernetes.content["pods"] = [pod("w0", replica=0), pod("w1", replica=1)]
    kubernetes.content["logs"] = {
        # The first connection is lost in the middle.
        "w0": [log_of(*lines[:2]), log_of(*lines)],
        "w1": [log_of("[rank 3] w1 warns", minute=1)],
        "again": [log_of(progress_line.encode({"point": POINT}), "continuing", minute=2)],
    }

    def go_on():
        if kubernetes.read.count("w0") == 2 and "w1" in kubernetes.read:
            # Preempted: its pods are removed, and come back as others.
            kubernetes.content["pods"] = [pod("again", phase="Succeeded", replica=0)]
        if "again" in kubernetes.read:
            admin.executions["run"].closure.phase = core_pb2.WorkflowExecution.SUCCEEDED

    kubernetes.after = go_on
    followed = list(client.logs("run", follow=True))
    assert [line.text for line in followed if line.rank == 0] == [*lines, "continuing"]
    assert [line.text for line in followed if line.rank == 3] == ["w1 warns"]
    assert len(followed) == 6


def test_the_logs_of_removed_pods_are_those_in_the_folder_of_the_executions_spec(
    client, admin, kubernetes, tmp_path, caplog
):
    admin.add("run", core_pb2.WorkflowExecution.SUCCEEDED)
    admin.inputs["run"] = spec_inputs(RunSpec(name="run", output=str(tmp_path)))
    assert list(client.logs("run")) == []
    assert f"removed, with their logs, and {tmp_path}/run/logs is not on this machine" in caplog.text
    caplog.clear()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    name = kept_log.file_name(9.0, "run-n0-0-worker-1")
    (tmp_path / "run" / "logs" / name).write_bytes(
        kept_log.header("run-n0-0-worker-1", 2) + kept_log.entry(9.5, 4, "step 3")
    )
    assert list(client.logs("run")) == [LogLine(9.5, 4, "step 3", "run-n0-0-worker-1", 2, name)]
    assert list(client.logs(str(tmp_path / "run"))) == list(client.logs("run")) and not caplog.messages
    # Of another workflow, and of another version.
    admin.inputs["run"] = None
    assert list(client.logs("run")) == [] and "the cluster may archive them" in caplog.text


def test_a_line_of_the_kubelets_own_is_not_the_runs(client, admin, kubernetes, caplog):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content["pods"] = [pod("w0", replica=0)]
    trouble = "unable to retrieve container logs for containerd://ab\n"
    kubernetes.content["logs"] = {"w0": [trouble + log_of(progress_line.encode({"stage": "training", "steps": 10}))]}
    assert client.get("run").stage is Stage.TRAINING
    assert list(client.logs("run")) == []
    assert caplog.messages == [f"log of w0: {trouble.strip()}"]


def test_a_run_whose_machine_does_not_answer_goes_on(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content["pods"] = [pod("w0", replica=0)]
    kubernetes.content["logs"] = {"w0": (500, "dial tcp 10.0.0.7:10250: i/o timeout")}
    run = client.get("run")
    assert run.phase is Phase.RUNNING and "i/o timeout" in run.message


def test_metrics_of_a_run_that_goes_on_are_those_that_it_tells(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.FAILED)
    kubernetes.content["pods"] = [pod("w0", phase="Failed", replica=0)]
    kubernetes.content["logs"] = {"w0": [log_of("step 4/10", progress_line.encode({"point": POINT}), "@strata {torn")]}
    assert [(point.step, point.loss) for point in client.metrics("run")] == [(4, 2.0)]
    assert [line.text for line in client.logs("run")] == ["step 4/10", "@strata {torn"]


def test_events_are_those_of_the_runs_own_objects(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    names = ("run-n0-0", "pytorchjob-run-n2-0-dn0-0-a1b2", "run-x2-n0-0", "runner-n0-0", "run")
    kubernetes.content["events"] = (
        200,
        [
            {"metadata": {"name": name, "creationTimestamp": "2026-11-22T00:00:05Z"}, "reason": "Seen", "message": "m",
             "type": "Warning", "involvedObject": {"kind": "Pod", "name": name}}
            for name in names
        ],
    )  # fmt: skip
    events = client.events("run")
    assert [event.reason for event in events] == ["Submitted", "Seen", "Seen", "Seen"]
    assert {event.about for event in events[1:]} == {f"pod/{names[0]}", f"pod/{names[1]}", "pod/run"}
    assert {event.kind for event in events[1:]} == {"warning"}


def test_events_of_a_run_that_succeeded_say_where_the_time_of_its_start_went(client, admin, kubernetes, tmp_path):
    admin.add("run", core_pb2.WorkflowExecution.SUCCEEDED)
    startup = {"imports": 2.5, "model": 1.0, "first step": 0.25}
    (tmp_path / "record.json").write_text(json.dumps({"begun": 1000.0, "startup": startup}))
    (tmp_path / "old.json").write_text("{}")
    admin.outputs["run"] = dict.fromkeys(("model", "report"), "file:///x") | {
        "record": f"file://{tmp_path}/record.json"
    }
    found = [event for event in client.events("run") if event.reason == "Startup"]
    assert [(event.time, event.message) for event in found] == [
        (1002.5, "imports: 2.50 s"), (1003.5, "model: 1.00 s"), (1003.75, "first step: 0.25 s"),
    ]  # fmt: skip
    # What came before the processes is known while the pod exists, whether or not the run has ended.
    scheduled = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-22T00:00:03Z"}]
    training = pod("w0", replica=0, conditions=scheduled)
    training["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": "2026-11-22T00:00:07Z"}}
    kubernetes.content["pods"] = [training]
    messages = [event.message for event in client.events("run") if event.reason == "Startup"]
    assert messages[-2:] == ["scheduler: 3 s", "image, container: 4 s"] and len(messages) == 5
    kubernetes.content["pods"] = []
    admin.outputs["run"]["record"] = f"file://{tmp_path}/old.json"
    assert "Startup" not in {event.reason for event in client.events("run")}


def test_events_of_objects_with_hashed_names_are_known_by_their_labels(client, admin, kubernetes):
    admin.add("run", core_pb2.WorkflowExecution.RUNNING)
    kubernetes.content["pods"] = [pod("fhashed")]
    kubernetes.content["pytorchjobs"] = (200, [{"metadata": {"name": "fjob", "uid": "uid-job"}}])
    kubernetes.content["workloads"] = (200, [workload("workload", owner="uid-job"), workload("other")])
    kubernetes.content["events"] = (
        200,
        [
            {"metadata": {"name": uid, "creationTimestamp": "2026-11-22T00:00:05Z"}, "reason": "Seen",
             "involvedObject": {"kind": "Some", "name": f"f{uid}", "uid": uid}}
            for uid in ("uid-fhashed", "uid-job", "uid-workload", "uid-other")
        ],
    )  # fmt: skip
    about = [event.about for event in client.events("run")][1:]
    assert about == ["some/fuid-fhashed", "some/fuid-job", "some/fuid-workload"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none.yaml", None, "No such file"),
        ("broken.yaml", "admin: {endpoint: x", "while parsing"),
        ("empty.yml", "# nothing yet\n", "it has no fields"),
        ("config", "admin: x\n", "no section headers"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_configuration_that_is_named_and_not_there_is_an_error(tmp_path, monkeypatch, name, text, why, by):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    if by == "environment":
        monkeypatch.setenv("FLYTECTL_CONFIG", str(file))
    with pytest.raises(BackendError, match=rf"configuration {file} cannot be read: .*{why}") as caught:
        FlyteBackend(config=str(file) if by == "argument" else None)
    assert caught.value.reason == "NoConfiguration"


def test_prices_are_those_of_the_namespace(kubernetes, monkeypatch):
    monkeypatch.delenv("STRATA_PROJECT", raising=False)
    monkeypatch.delenv("STRATA_DOMAIN", raising=False)
    assert prices_of_cluster() is None
    kubernetes.content["configmaps"]["strata-prices"] = (200, {"prices.yaml": "currency: EUR\ngpus: {h200: 3}"})
    assert prices_of_cluster() == Prices(currency="EUR", gpus={"h200": 3})
    kubernetes.content["configmaps"]["strata-prices"] = (403, {})
    with pytest.raises(Refused, match="Kubernetes refused to read the config map strata-prices"):
        prices_of_cluster()
    kubernetes.content["configmaps"]["strata-prices"] = (200, {"prices.yaml": "gpus: {h2: 3}"})
    with pytest.raises(SpecError, match=r"the config map strata-prices has 1 problem:\n  gpus\.h2"):
        prices_of_cluster()


def test_list_and_get_agree_on_what_waits(client, admin, kubernetes, caplog):
    for name in ("waits", "trains", "ended"):
        phase = core_pb2.WorkflowExecution.FAILED if name == "ended" else core_pb2.WorkflowExecution.RUNNING
        admin.add(name, phase, name, owner="ada")
    kubernetes.content["logs"] = {"w0": [log_of("hello")]}
    kubernetes.content["pods"] = [pod("w0", replica=0) | {"metadata": pod("w0")["metadata"] | {
        "labels": {"execution-id": "trains", "task-name": TRAIN}}}]  # fmt: skip
    job = {"metadata": {"name": "job", "uid": "uid-job", "labels": {"execution-id": "waits"}}}
    kubernetes.content["pytorchjobs"] = (200, [job])
    kubernetes.content["workloads"] = (
        200,
        [workload("w", owner="uid-job", QuotaReserved={"status": "False", "message": "insufficient quota"})],
    )
    listed = {run.name: run for run in client.list()}
    assert (listed["waits"].phase, listed["waits"].stage) == (Phase.QUEUED, Stage.WAITING)
    assert (listed["waits"].message, listed["waits"].queue) == ("insufficient quota", "research")
    assert (listed["trains"].phase, listed["trains"].stage) == (Phase.RUNNING, Stage.STARTING)
    assert listed["ended"].stage is None
    got = client.get("waits")
    assert (got.phase, got.stage, got.message, got.position) == (
        listed["waits"].phase, listed["waits"].stage, listed["waits"].message, listed["waits"].position,
    )  # fmt: skip
    # Without the right to see pods, runs are listed as Flyte knows them, and the reason is said.
    kubernetes.content["workloads"] = (403, [])
    assert {run.phase for run in client.list()} == {Phase.RUNNING, Phase.FAILED}
    assert caplog.messages == ["cannot read which runs are waiting: Kubernetes refused to list workloads: you may not"]


TRAINING, FINISHING, TASK = "tasks.topology.train_2x4", "tasks.finish.finish", core_pb2.TaskExecution


def test_costs_are_those_of_every_attempt_that_flyte_knows(client, admin, kubernetes, tmp_path, monkeypatch, caplog):
    """Of executions that succeeded, failed or run, and of those that were submitted again."""
    spec = {"name": "run", "resources": {"gpu": 4, "gpu_type": "NVIDIA-H200"}, "parallel": {"type": "ddp"},
            "topology": {"nnodes": 2, "nproc_per_node": 4}}  # fmt: skip
    inputs = spec_inputs(RunSpec.model_validate(spec))
    phases = {"run": "FAILED", "run-x2": "SUCCEEDED", "goes-on": "RUNNING", "removed": "FAILED", "early": "FAILED"}
    for name, phase in phases.items():
        admin.add(name, getattr(core_pb2.WorkflowExecution, phase), name.removesuffix("-x2"), owner="ada")
        admin.nodes[name, ""] = {f"{name}-n0": True}
        admin.nodes[name, f"{name}-n0"] = {f"{name}-dn0": False, f"{name}-dn1": False}
        admin.inputs |= {f"{name}-dn0": inputs, f"{name}-dn1": inputs} if name != "removed" else {}
    # Of a version whose specs had no gpu_type.
    early = literals_pb2.Binary(value=msgpack.dumps({"resources": {"gpu": 4}}), tag="msgpack")
    early = literals_pb2.Literal(scalar=literals_pb2.Scalar(binary=early))
    admin.inputs["early-dn0"] = literals_pb2.LiteralMap(literals={"spec": early})
    # One that waited only, one that ended the attempt, and one without a duration, as of an abort.
    admin.attempt("run-dn0", TRAINING, 0, TASK.FAILED, began=None, updated=50)
    admin.attempt("run-dn0", TRAINING, 1, TASK.FAILED, began=100, seconds=1800)
    admin.attempt("run-dn0", TRAINING, 2, TASK.ABORTED, began=2000, updated=2900)
    admin.attempt("run-x2-dn0", TRAINING, 0, TASK.SUCCEEDED, began=100, seconds=2700)
    admin.attempt("run-x2-dn1", FINISHING, 0, TASK.SUCCEEDED, began=3000, seconds=1800)
    admin.attempt("run-x2-dn1", "tasks.prepare.prepare", 0, TASK.SUCCEEDED, began=0, seconds=9999)
    admin.attempt("goes-on-dn0", TRAINING, 0, TASK.RUNNING, began=0)
    for name in ("removed", "early"):
        admin.attempt(f"{name}-dn0", TRAINING, 0, TASK.FAILED, began=0, seconds=1800)
    at = datetime(2026, 11, 22, 1, tzinfo=UTC).timestamp()
    monkeypatch.setattr("strata_platform.backends.flyte.time", SimpleNamespace(time=lambda: at))
    kubernetes.content["configmaps"]["strata-prices"] = (200, {"prices.yaml": "currency: USD\ngpus: {h200: 3}"})
    monkeypatch.setenv("FLYTECTL_CONFIG", str(tmp_path / "flyte.yaml"))
    options = ["--days", "100000", "--project", "flytesnacks", "--project", "rival"]
    done = CliRunner().invoke(app, ["costs", "--backend", "flyte", *options])
    assert done.exit_code == 0, done.output
    # (1800 + 900 + 2700 + 3600) s of eight GPUs, and 1800 s of one.
    hours, cost = 8 * 9000 / 3600 + 0.5, 3 * (8 * 9000 / 3600 + 0.5)
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [
        [f"{project}/development", "ada", "4", "2", f"{hours:.2f}", "0.00", f"{cost:.2f}", "USD"]
        for project in ("flytesnacks", "rival")
    ]
    assert admin.listed == ["flytesnacks", "rival"]
    assert "the GPU hours of removed are unknown: its inputs are gone" in caplog.text
    assert "the GPU hours of early are unknown: the spec among its inputs has no resources.gpu_type" in caplog.text


def test_a_store_that_does_not_answer_is_said_by_get(client, admin, tmp_path):
    admin.add("run", core_pb2.WorkflowExecution.SUCCEEDED, owner="ada")
    # Reading a folder fails as no missing file does.
    admin.outputs["run"] = {kind: f"file://{tmp_path}" for kind in ("model", "report", "record")}
    assert client.get("run").phase is Phase.SUCCEEDED and "the object store did not give" in client.get("run").message


def test_the_table_of_runs_has_their_owners_and_says_when_it_is_cut(client, admin, kubernetes, tmp_path, monkeypatch):
    for number in range(3):
        admin.add(f"run-{number}", core_pb2.WorkflowExecution.FAILED, owner="ada" if number else "bob")
    monkeypatch.setenv("FLYTECTL_CONFIG", str(tmp_path / "flyte.yaml"))
    monkeypatch.setenv("STRATA_BACKEND", "flyte")
    monkeypatch.setenv("STRATA_OWNER", "ada")

    def rows(*options):
        done = CliRunner().invoke(app, ["list", *options])
        assert done.exit_code == 0, done.output
        return [line.split()[:3] for line in done.stdout.splitlines()[1:]], done.stderr

    assert rows("--mine") == ([["run-2", "failed", "ada"], ["run-1", "failed", "ada"]], "")
    assert rows("--owner", "bob")[0] == [["run-0", "failed", "bob"]]
    shown, said = rows("--limit", "2")
    assert len(shown) == 2 and "these are the newest 2; --limit shows more, --limit 0 all" in said
    assert len(rows("--limit", "0")[0]) == len(rows("--limit", "3")[0]) == 3
    assert CliRunner().invoke(app, ["list", "--mine", "--owner", "bob"]).exit_code == 2
