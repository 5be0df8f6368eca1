"""The client over Flyte: what it makes of real messages, and of what a gRPC and an HTTP server answer.

Whole runs on a cluster are in tests/e2e.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlparse

import grpc
import pytest
import yaml
from flyteidl.admin import execution_pb2
from flyteidl.core import execution_pb2 as core_pb2
from flyteidl.core import identifier_pb2
from flyteidl.service import admin_pb2_grpc
from flytekit.configuration.file import get_config_file
from kubernetes.client import ApiException

from strata_platform import progress_line
from strata_platform.backends.api_errors import translate
from strata_platform.backends.flyte import PHASES, FlyteBackend, error_text
from strata_platform.backends.kubernetes_objects import Namespace, RunStatus, status_of
from strata_platform.backends.pod_logs import TimeOrderedLines, line_of
from strata_platform.client import Client, prices_of_cluster
from strata_platform.errors import BackendError, NotReady, Refused, RunNotFound, SpecError, Unreachable
from strata_platform.estimate import Prices
from strata_platform.runs import LogLine, Phase, Stage

NAMESPACE = "flytesnacks-development"
TRAIN = "tasks-topology-train-2x2"


def pod(name, task=TRAIN, phase="Running", replica=None, **more):
    """A pod as the API server sends it."""
    labels = {"execution-id": "run", "task-name": task}
    if replica is not None:
        labels["training.kubeflow.org/replica-index"] = str(replica)
    begun = {"state": {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}}}
    status = {"name": "pytorch", "image": "i", "imageID": "", "ready": True, "restartCount": 0, **begun}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": labels,
                     "creationTimestamp": "2026-11-22T00:00:00Z"},
        "spec": {"containers": [{"name": "pytorch", "env": [{"name": "FLYTE_ATTEMPT_NUMBER", "value": "1"}]}]},
        "status": {"phase": phase, "containerStatuses": [] if phase == "Pending" else [status], **more},
    }  # fmt: skip


def workload(name, owner=None, queue="research", priority=0, created="2026-11-22T00:00:00Z", **conditions):
    """What Kueue keeps of a job, as the API server sends it."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created,
                     "ownerReferences": [{"uid": owner or name}]},
        "spec": {"queueName": queue, "priority": priority},
        "status": {"conditions": [{"type": kind, **value} for kind, value in conditions.items()]},
    }  # fmt: skip


class Kubernetes(BaseHTTPRequestHandler):
    """Pods, their logs, one text for each connection, and lists of other kinds, from `server.content`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlparse(self.path).path.split("/")
        content = self.server.content
        match parts[parts.index("namespaces") + 2 :]:
            case ["pods"]:
                self.answer(200, {"items": content["pods"]})
            case ["pods", name]:
                found = next((item for item in content["pods"] if item["metadata"]["name"] == name), None)
                self.answer(200 if found else 404, found or {"message": f"pods {name} not found"})
            case ["pods", name, "log"]:
                parts = content["logs"][name]
                if isinstance(parts, tuple):
                    return self.answer(parts[0], {"message": parts[1]})
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write((parts.pop(0) if len(parts) > 1 else parts[0]).encode())
                self.close_connection = True
                self.server.read.append(name)
            case ["configmaps", name]:
                status, data = content["configmaps"].get(name, (404, {}))
                self.answer(status, {"data": data, "message": "you may not"})
            case [kind]:
                status, items = content[kind]
                self.answer(status, {"items": items, "message": "you may not"})
        self.server.after()

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    """A server that answers as `content` says, and calls `after` then; `read` has the names of the logs it gave."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes)
    server.content = {"pods": [], "logs": {}, "pytorchjobs": (200, []), "workloads": (200, []), "events": (200, [])}
    server.content["configmaps"] = {}
    server.after, server.read = lambda: None, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    named = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [named],
        "contexts": [context],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pods_of(server, *items):
    server.content["pods"] = list(items)
    return Namespace(NAMESPACE).pods("run")


RESERVED = {"QuotaReserved": {"status": "True"}, "Admitted": {"status": "True"}}
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]
BACK_OFF = [{"name": "c", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
             "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]  # fmt: skip


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
        ([pod("e", "tasks-evaluate-evaluate")], [workload("x", Finished={"status": "True"})],
         RunStatus(Stage.EVALUATING)),
        ([pod("x", "tasks-export-export")], [], RunStatus(Stage.EXPORTING)),
    ],
    ids=["nothing yet", "in the queue", "evicted", "no node", "held back", "one of two", "no image", "prepares",
         "starts", "evaluates", "exports"],
)  # fmt: skip
def test_where_a_run_is(kubernetes, pods, workloads, expected):
    assert status_of(pods_of(kubernetes, *pods), workloads, {"mine", "uid-a"}) == expected


def test_lines_have_the_rank_that_they_tell_or_that_of_their_pods_first_process(kubernetes):
    worker, single, other = pods_of(
        kubernetes, pod("w", replica=3), pod("s", "tasks-topology-train-1x1"), pod("p", "tasks-prepare-plan")
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


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Executions of a project, in memory; `refusal` is what the next `refusals` calls are answered instead."""

    def __init__(self):
        self.executions, self.terminated = {}, []
        self.refusal, self.refusals = None, 0

    def add(self, name, phase, label=None, error=None):
        spec = execution_pb2.ExecutionSpec(
            launch_plan=identifier_pb2.Identifier(resource_type="LAUNCH_PLAN", name="workflows.finetune.finetune")
        )
        if label:
            spec.labels.values["strata/run"] = label
        closure = execution_pb2.ExecutionClosure(phase=phase)
        closure.created_at.FromDatetime(datetime(2026, 11, 22) + timedelta(seconds=len(self.executions)))
        if error:
            closure.error.message = error
        identifier = identifier_pb2.WorkflowExecutionIdentifier(project="flytesnacks", domain="development", name=name)
        self.executions[name] = execution_pb2.Execution(id=identifier, spec=spec, closure=closure)

    def GetExecution(self, request, context):
        if self.refusals:
            self.refusals -= 1
            context.abort(*self.refusal)
        if request.id.name not in self.executions:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        return self.executions[request.id.name]

    def ListExecutions(self, request, context):
        newest = sorted(self.executions.values(), key=lambda found: -found.closure.created_at.seconds)
        return execution_pb2.ExecutionList(executions=newest)

    def TerminateExecution(self, request, context):
        self.terminated.append(request.id.name)
        self.executions[request.id.name].closure.phase = core_pb2.WorkflowExecution.ABORTED
        return execution_pb2.ExecutionTerminateResponse()


@pytest.fixture
def admin(tmp_path):
    servicer = Admin()
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "flyte.yaml").write_text(f"admin: {{endpoint: 'dns:///127.0.0.1:{port}', insecure: true}}\n")
    servicer.stop = lambda: server.stop(None).wait()
    yield servicer
    servicer.stop()


@pytest.fixture
def client(admin, kubernetes, tmp_path):
    return Client(FlyteBackend(config=str(tmp_path / "flyte.yaml")), poll=0.01)


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
    # flytekit itself asks four times.
    admin.refusal, admin.refusals = (grpc.StatusCode.UNAVAILABLE, "starting"), 10
    assert client.wait("run").phase is Phase.FAILED
    assert caplog.messages == ["Flyte refused to look for run: starting; trying again"]
    monkeypatch.setattr("strata_platform.backends.backend.RETRY_SECONDS", 0.0)
    admin.refusals = 100
    with pytest.raises(Unreachable):
        client.wait("run")


def test_errors_of_kubernetes_without_a_body():
    error = translate(ApiException(status=500, reason="Internal Server Error"), "to list pods")
    assert str(error) == "Kubernetes refused to list pods: Internal Server Error"


POINT = {"step": 4, "attempt": 1, "time": 0.0, "loss": 2.0, "learning_rate": 0.1, "grad_norm": None, "tokens": 1,
         "target_tokens": 1, "tokens_per_second": 8.0, "step_seconds": 3.0, "memory_bytes": 1}  # fmt: skip


def log_of(*lines, minute=0):
    stamped = (f"2026-11-22T00:{minute:02d}:{second:02d}.000000000Z {line}\n" for second, line in enumerate(lines))
    return "".join(stamped)


def test_an_execution_of_another_workflow_has_no_outputs(client, admin, monkeypatch):
    """A sweep leaves a table and the best spec."""
    admin.add("sweep", core_pb2.WorkflowExecution.SUCCEEDED)
    outputs = SimpleNamespace(outputs=SimpleNamespace(literals={"table": None, "best": None}))
    monkeypatch.setattr("flytekit.remote.FlyteRemote.sync_execution", lambda *arguments: outputs)
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
    get_config_file.cache_clear()
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
