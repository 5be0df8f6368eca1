"""Runs as JobSets, beside an API server that keeps them; tests/e2e has a real one."""

import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlparse

import pytest
from typer.testing import CliRunner
from urllib3.exceptions import HTTPError

from strata_platform import kept_log, progress_line
from strata_platform.backends.kubernetes import KubernetesBackend
from strata_platform.chart import queue_timeout
from strata_platform.cli import app
from strata_platform.client import Client
from strata_platform.errors import BackendError, NotReady, RunExists, RunNotFound
from strata_platform.runs import Held, Phase, Stage
from strata_platform.spec import RunSpec
from tests.platform.helpers.servers import NAMESPACE, Kubernetes, content, workload

SPEC = RunSpec.model_validate(
    {"name": "bot", "output": "/runs", "topology": {"nnodes": 2}, "parallel": {"type": "ddp"}}
)
TEMPLATE = {
    "metadata": {"name": "strata", "annotations": {"strata/image": "registry/strata:1"}},
    "template": {"spec": {"containers": [{"name": "default"}]}},
}
PRIMARY = TEMPLATE | {"template": {"spec": {"containers": [{"name": "primary"}]}}}
TIME = "2026-11-22T00:00:00Z"


class Server(Kubernetes):
    """Creates and changes JobSets, as an API server does; `server.lost` answers are lost after that."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] == "SelfSubjectReview" and self.server.account is None:
            self.close_connection = True
            return None
        if body["kind"] == "SelfSubjectReview":
            status, username = self.server.account
            return self.answer(status, {"status": {"userInfo": {"username": username}}, "message": "you may not"})
        assert parse_qs(urlparse(self.path).query)["fieldValidation"] == ["Strict"]
        self.server.before_create()
        status, jobs = self.server.content["jobsets"]
        if status == 404:
            return self.answer(404, {"message": "the server could not find the requested resource"})
        if any(job["metadata"]["name"] == body["metadata"]["name"] for job in jobs):
            return self.answer(409, {"message": "already exists"})
        add(self.server, body)
        if self.server.lost:
            self.server.lost -= 1
            return self.answer(409, {"message": "already exists"})
        self.answer(201, body)

    def do_PATCH(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, name = urlparse(self.path).path.split("/")[-2:]
        self.server.changes.append((kind, name, body))
        for job in self.server.content["jobsets"][1] if kind == "jobsets" else []:
            if job["metadata"]["name"] == name:
                job["metadata"]["annotations"] |= body.get("metadata", {}).get("annotations", {})
        self.answer(200, {})

    def do_GET(self):
        self.server.paths.append(self.path)
        match urlparse(self.path).path.split("/")[-2:]:
            case ["podtemplates", name]:
                found = self.server.content["podtemplates"].get(name)
                self.answer(200 if found else 404, found or {"message": "there is none"})
            case [_, "jobsets"]:
                (selector,) = parse_qs(urlparse(self.path).query).get("labelSelector", [""])
                label, _, value = selector.partition("=")
                jobs = [
                    job
                    for job in self.server.content["jobsets"][1]
                    if not label or ((own := job["metadata"].get("labels", {}).get(label)) and value in ("", own))
                ]
                self.answer(200, {"items": jobs})
            case ["jobsets", name]:
                found = [
                    job
                    for job in self.server.content["jobsets"][1]
                    if job["metadata"]["name"] == name != self.server.hidden
                ]
                self.answer(200 if found else 404, found[0] if found else {"message": "there is none"})
            case _:
                super().do_GET()


def add(server, body):
    number = len(server.content["jobsets"][1])
    body["metadata"] |= {"uid": f"uid-{number}", "creationTimestamp": TIME}
    server.content["jobsets"][1].append(body)


@pytest.fixture
def server(kubernetes, monkeypatch):
    kubernetes.RequestHandlerClass = Server
    kubernetes.content = content() | {"jobsets": (200, []), "podtemplates": {"strata": TEMPLATE}}
    kubernetes.lost, kubernetes.changes, kubernetes.before_create = 0, [], lambda: None
    # Listed, and removed when it is asked for.
    kubernetes.hidden = None
    kubernetes.account, kubernetes.paths = (201, "ada"), []
    monkeypatch.delenv("STRATA_OWNER", raising=False)
    return kubernetes


@pytest.fixture
def runs(server):
    return Client(KubernetesBackend(NAMESPACE), poll=0.01)


def pod(name, index=0, phase="Running", ended=None, restart=0):
    labels = {"strata/execution": "bot", "strata/shape": "2x4", "batch.kubernetes.io/job-completion-index": str(index),
              "jobset.sigs.k8s.io/restart-attempt": str(restart)}  # fmt: skip
    state = {"terminated": ended} if ended else {"running": {}}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, "creationTimestamp": TIME},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": phase, "startTime": TIME, "containerStatuses": [{"name": "main", "state": state}]},
    }


def end(server, kind, message=""):
    condition = {"type": kind, "status": "True", "lastTransitionTime": "2026-11-22T01:00:00Z", "message": message}
    server.content["jobsets"][1][-1]["status"] = {"conditions": [condition], "restarts": 2}


def test_a_run_is_submitted_once_and_again_when_it_has_ended(server, runs):
    run = runs.submit(SPEC)
    assert (run.name, run.phase, run.owner, run.where) == ("bot", Phase.RUNNING, "ada", f"{NAMESPACE}/jobsets/bot")
    with pytest.raises(RunExists, match="has not ended, as JobSet bot of ada; follow it with"):
        runs.submit(SPEC)
    end(server, "Failed")
    assert runs.submit(SPEC).where.endswith("/bot-x2")
    assert [(run.name, run.where[-6:]) for run in runs.list()] == [("bot", "bot-x2")]
    # The first one has ended, and its pods may be there still.
    assert (runs.get("bot").phase, runs.get("bot").where[-6:]) == (Phase.RUNNING, "bot-x2")
    assert runs.events("bot")[0].message.endswith("/jobsets/bot-x2 of ada")


def test_a_run_that_has_succeeded_is_not_started_again(server, runs, tmp_path, monkeypatch):
    # Of a value that the variable cannot hold as it is.
    spec = SPEC.model_copy(update={"tracking": SPEC.tracking.model_copy(update={"project": "$(HOME)"})})
    runs.submit(spec)
    end(server, "Completed")
    run = runs.submit(spec)
    assert (run.phase, run.where[-4:]) == (Phase.SUCCEEDED, "/bot") and len(server.content["jobsets"][1]) == 1
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    monkeypatch.setenv("STRATA_BACKEND", "kubernetes")
    done = CliRunner().invoke(app, ["submit", str(tmp_path / "spec.json")])
    assert done.exit_code == 0 and "bot has succeeded with this spec before, as" in done.stdout, done.output
    assert len(server.content["jobsets"][1]) == 1
    # More steps of the same run, its folder gone, and a JobSet of another version.
    longer = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 999})})
    assert runs.submit(longer).where.endswith("/bot-x2")
    end(server, "Completed")
    assert runs.submit(longer, force=True).where.endswith("/bot-x3")
    end(server, "Completed")
    (inner,) = server.content["jobsets"][1][-1]["spec"]["replicatedJobs"]
    (variable,) = [
        item
        for item in inner["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
        if item["name"] == "STRATA_SPEC"
    ]
    variable["value"] = '{"field": "of another version"}'
    assert runs.submit(longer).where.endswith("/bot-x4")


@pytest.mark.parametrize(
    ("account", "named", "owner", "said"),
    [
        ((201, "oidc:ada@example.com"), None, "oidc-ada-example.com", ""),
        # A person is not another one.
        ((201, "ada"), "grace", "ada", "STRATA_OWNER is ignored: the runs' owner is ada"),
        # A program may submit for one.
        ((201, "system:serviceaccount:hub:notebook"), "grace", "grace", ""),
        ((201, "system:serviceaccount:hub:notebook"), None, "system-serviceaccount-hub-notebook", ""),
        ((403, ""), "grace", "grace", "cannot read your account from Kubernetes"),
    ],
)
def test_the_owner_is_who_kubernetes_knows(server, runs, account, named, owner, said, monkeypatch, caplog):
    server.account = account
    if named:
        monkeypatch.setenv("STRATA_OWNER", named)
    assert runs.submit(SPEC).owner == owner and said in caplog.text and bool(said) == bool(caplog.text)
    monkeypatch.setenv("STRATA_BACKEND", "kubernetes")
    assert "bot" in CliRunner().invoke(app, ["list", "--mine"]).stdout
    assert "bot" not in CliRunner().invoke(app, ["list", "--owner", "somebody"]).stdout


def test_of_two_submissions_at_once_one_has_the_name(server, runs):
    def overtaken():
        server.before_create = lambda: None
        Client(KubernetesBackend(NAMESPACE)).submit(SPEC)

    server.before_create = overtaken
    with pytest.raises(RunExists, match="has not ended, as JobSet bot"):
        runs.submit(SPEC)
    assert len(server.content["jobsets"][1]) == 1


def test_a_submission_whose_answer_was_lost_is_known_as_ones_own(server, runs):
    server.lost = 1
    assert runs.submit(SPEC).where.endswith("/bot")
    assert len(server.content["jobsets"][1]) == 1


def test_another_run_may_have_the_name_of_the_next_jobset(server, runs):
    runs.submit(SPEC.model_copy(update={"name": "bot-x2"}))
    assert runs.submit(SPEC).where.endswith("/bot")
    end(server, "Failed")
    assert runs.submit(SPEC).where.endswith("/bot-x3")
    assert runs.get("bot-x2").where.endswith("/bot-x2")


def test_a_jobset_that_is_no_runs_may_have_the_name(server, runs):
    add(server, {"metadata": {"name": "bot"}})
    assert runs.submit(SPEC).where.endswith("/bot-x2")
    assert [run.name for run in runs.list()] == ["bot"]


@pytest.mark.parametrize(
    ("changes", "templates", "said"),
    [
        ({"output": "out"}, {"strata": TEMPLATE}, "output 'out' is a folder inside each pod"),
        ({}, {}, "no pod template 'strata' in the namespace flytesnacks-development"),
        ({}, {"strata": TEMPLATE | {"metadata": {}}}, "names no image; give one with --image"),
        ({}, {"strata": PRIMARY}, "pod template 'strata': its containers are primary; runs without Flyte take"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_submitted(server, runs, changes, templates, said):
    server.content["podtemplates"] = templates
    with pytest.raises(BackendError, match=said):
        runs.submit(SPEC.model_copy(update=changes))
    assert server.content["jobsets"][1] == []


def test_a_cluster_without_jobset_is_told_apart_from_a_run_that_is_not_there(server, runs):
    server.content["jobsets"] = (404, [])
    with pytest.raises(BackendError, match=r"no JobSets of jobset\.x-k8s\.io/v1alpha2; install JobSet"):
        runs.submit(SPEC)


def test_a_run_that_kueue_manages_is_canceled_through_its_workload(server, runs):
    runs.submit(SPEC)
    server.content["workloads"] = (200, [workload("jobset-bot", owner="uid-0"), workload("other")])
    assert runs.cancel("bot").phase is Phase.ABORTED
    (annotated, told) = server.changes
    assert annotated[:2] == ("jobsets", "bot") and "suspend" not in json.dumps(annotated)
    # Kueue would resume what is only suspended.
    assert told == ("workloads", "jobset-bot", {"spec": {"active": False}})
    runs.backend.cancel("bot")
    assert len(server.changes) == 2, "it has ended"
    assert "submit it again to continue" in runs.get("bot").message


def test_a_run_that_can_never_be_admitted_is_ended_with_the_reason(server, runs):
    never = {"status": "False", "lastTransitionTime": TIME, "message": "request (9) > maximum capacity (4)"}
    names = ("large", "ended")
    for number, name in enumerate(names):
        runs.submit(SPEC.model_copy(update={"name": name}))
        server.content["jobsets"][1][-1]["metadata"]["uid"] = f"uid-{number}"
    waiting = [workload(name, owner=f"uid-{number}", QuotaReserved=never) for number, name in enumerate(names)]
    # Its workload may outlive it for a while.
    end(server, "Failed")
    # As may that of one that is removed meanwhile.
    runs.submit(SPEC.model_copy(update={"name": "gone"}))
    waiting.insert(0, workload("gone", owner="uid-2", QuotaReserved=never))
    server.hidden = "gone"
    server.content["workloads"] = (200, waiting)
    tenant = {"namespace": NAMESPACE, "project": "p", "domain": "d", "job_sets": True}
    # No Flyte is asked: there is none.
    settings = queue_timeout.Settings(after="2h", flyte=False, tenants=[tenant])

    def look(hour):
        return list(queue_timeout.end_hopeless_runs(settings, datetime(2026, 11, 22, hour, tzinfo=UTC)))

    assert look(1) == [] and server.changes == []
    (said,) = look(3)
    assert said.startswith(f"{NAMESPACE}: large is ended: no quota of queue research is large enough")
    run = runs.get("large")
    assert run.phase is Phase.ABORTED and run.message == said.partition("is ended: ")[2]
    assert "maximum capacity (4)); ask for less" in run.message and "queues.timeout.after, 2h" in run.message
    assert ("workloads", "large", {"spec": {"active": False}}) in server.changes
    assert look(4) == [], "once"


def test_without_kueue_a_run_is_suspended(server, runs):
    runs.submit(SPEC)
    server.content |= {"pods": [pod("a")], "logs": {"a": [""]}}
    runs.backend.cancel("bot")
    assert ("jobsets", "bot", {"spec": {"suspend": True}}) in server.changes
    # Its pods have their grace period.
    assert (runs.get("bot").phase, runs.get("bot").message) == (Phase.RUNNING, "canceled; its pods are ending")


def test_why_a_run_failed_is_what_its_first_pod_said_last(server, runs):
    runs.submit(SPEC)
    said = "step 3\nerror: data.sources[0]: there is no such file\n  given: 'x'\n"
    first = {"exitCode": 2, "finishedAt": "2026-11-22T00:59:00Z", "message": said}
    later = {"exitCode": 143, "finishedAt": "2026-11-22T00:59:30Z", "message": "error: told to stop"}
    server.content["pods"] = [pod("b", 1, "Failed", later), pod("a", 0, "Failed", first)]
    end(server, "Failed", "applying FailJobSet")
    run = runs.get("bot")
    assert (run.phase, run.message) == (Phase.FAILED, "data.sources[0]: there is no such file\n  given: 'x'")
    assert run.ended - run.started == 3600 and run.restarts == 2
    server.content["pods"] = []
    assert runs.get("bot").message == "applying FailJobSet"


def test_progress_and_record_are_those_that_rank_0_reports(server, runs):
    runs.submit(SPEC)
    server.content["pods"] = [pod("a"), pod("b", 1)]
    server.content["logs"] = {
        "a": [f'{TIME} @strata {{"stage":"training","steps":9,"attempt":1}}\n{TIME} step 1\n'],
        "b": [f"{TIME} hello\n{TIME} [rank 6] here\n"],
    }
    run = runs.get("bot")
    assert (run.phase, run.stage, run.steps, run.restarts) == (Phase.RUNNING, Stage.TRAINING, 9, 1)
    assert {(line.rank, line.text) for line in runs.logs("bot")} == {(0, "step 1"), (4, "hello"), (6, "here")}
    server.content["pods"] = [pod("a", phase="Succeeded"), pod("b", 1, phase="Succeeded")]
    assert runs.get("bot").stage is Stage.EXPORTING, "its controller has yet to notice"
    end(server, "Completed")
    record = {"steps": 9, "steps_asked": 9, "train_loss": 0.5, "eval_loss_after": 0.6, "tokens_per_second": 7.0,
              "restarts": 1, "begun": 1000.0, "startup": {"imports": 2.5}}  # fmt: skip
    server.content["logs"]["a"] = [f"{TIME} @strata {json.dumps({'record': record})}\n"]
    assert [event.message for event in runs.events("bot") if event.reason == "Startup"] == ["imports: 2.50 s"]
    run = runs.get("bot")
    assert (run.phase, run.step, run.loss, run.eval_loss) == (Phase.SUCCEEDED, 9, 0.5, 0.6)
    assert runs.outputs("bot").model == "/runs/bot/model"


def test_what_a_run_held_is_the_time_of_its_admissions(server, runs, caplog):
    queued = SPEC.model_copy(update={"resources": SPEC.resources.model_copy(update={"queue": "research"})})
    runs.submit(queued)
    (job,) = server.content["jobsets"][1]
    mine = workload("w", job["metadata"]["uid"],
                    Admitted={"status": "True", "lastTransitionTime": "2026-11-22T00:50:00Z"})  # fmt: skip
    mine["status"]["accumulatedPastExecutionTimeSeconds"] = 900
    end(server, "Failed")
    server.content["workloads"] = (200, [mine])
    assert [held for _, held in runs.held()] == [[Held(900 + 600, 2, None)]]
    # Preempted, and waiting since then.
    mine["status"]["conditions"][0]["status"] = "False"
    assert [held for _, held in runs.held()] == [[Held(900, 2, None)]]
    del mine["status"]["accumulatedPastExecutionTimeSeconds"]
    assert [held for _, held in runs.held()] == [[]]
    server.content["workloads"] = (200, [])
    assert [held for _, held in runs.held()] == [None]
    assert "the GPU hours of bot are unknown: Kueue's workload of" in caplog.text


def test_a_run_goes_on_while_the_node_of_rank_0_does_not_answer(server, runs):
    runs.submit(SPEC)
    silent = (500, "dial tcp 10.0.0.7:10250: i/o timeout")
    server.content |= {"pods": [pod("a"), pod("b", 1)], "logs": {"a": silent}}
    run = runs.get("bot")
    assert run.phase is Phase.RUNNING and "i/o timeout" in run.message
    server.content["logs"]["a"] = [f'{TIME} @strata {{"stage":"training","steps":9}}\n']
    assert (runs.get("bot").steps, runs.get("bot").message) == (9, "")
    looks = [path for path in server.paths if "/pods/a/log" in path]
    # All of the log as soon as it can be read, and then its end.
    assert ["tailLines" in path for path in looks] == [False, False, True]
    end(server, "Completed")
    server.content |= {"pods": [pod("a", phase="Succeeded")], "logs": {"a": silent}}
    run = runs.get("bot")
    assert run.phase is Phase.SUCCEEDED and "i/o timeout" in run.message


def test_a_run_that_waits_says_so(server, runs):
    asked = SPEC.resources.model_copy(update={"time_limit": 60, "queue": "research"})
    runs.submit(SPEC.model_copy(update={"resources": asked}))
    waits = workload("jobset-bot", owner="uid-0", QuotaReserved={"status": "False", "message": "no quota"})
    server.content["workloads"] = (200, [waits])
    for run in (runs.get("bot"), *runs.list()):
        assert (run.phase, run.stage, run.queue) == (Phase.QUEUED, Stage.WAITING, "research")
    # Kueue 0.19's reason.
    over = {"status": "True", "reason": "DeactivatedDueToMaximumExecutionTimeExceeded", "message": "the time is over",
            "lastTransitionTime": "2026-11-22T02:00:00Z"}  # fmt: skip
    waits["spec"]["active"], waits["status"]["conditions"] = False, [{"type": "Evicted", **over}]
    server.content["jobsets"][1][0]["spec"]["suspend"] = True
    server.content |= {"pods": [pod("a")], "logs": {"a": [""]}}
    assert (runs.get("bot").phase, next(iter(runs.list())).is_done) == (Phase.QUEUED, False), "its pods are ending"
    server.content["pods"] = []
    for run in (runs.get("bot"), *runs.list()):
        assert run.phase is Phase.FAILED and "raise time_limit" in run.message and run.ended - run.submitted == 7200
    # It has ended for every verb.
    assert list(runs.logs("bot", follow=True)) == []
    assert runs.submit(SPEC).where.endswith("/bot-x2")


@pytest.mark.parametrize("reason", ["RequeuingLimitExceeded", "AdmissionCheck"])
def test_a_run_that_kueue_has_given_up_has_failed(server, runs, reason):
    resources = SPEC.resources.model_copy(update={"queue": "research"})
    for name in ("bot", "other"):
        runs.submit(SPEC.model_copy(update={"name": name, "resources": resources}))
    said = "exceeding the maximum number of re-queuing retries"
    evicted = {"status": "True", "reason": f"DeactivatedDueTo{reason}", "message": said,
               "lastTransitionTime": "2026-11-22T02:00:00Z"}  # fmt: skip
    given_up = [workload(f"jobset-{number}", owner=f"uid-{number}", Evicted=evicted) for number in range(2)]
    for job, each in zip(server.content["jobsets"][1], given_up, strict=True):
        job["spec"]["suspend"], each["spec"]["active"] = True, False
    server.content["workloads"] = (200, given_up)
    run = runs.wait("bot", timeout=1)
    assert run.phase is Phase.FAILED and said in run.message and run.ended - run.submitted == 7200
    read = server.paths = []
    assert [each.phase for each in runs.list()] == [Phase.FAILED] * 2
    assert sum("workloads" in path for path in read) == 1, "of all runs at once"
    # A person's change may be taken back.
    for each in given_up:
        each["status"]["conditions"][0]["reason"] = "Deactivated"
    assert runs.get("bot").phase is Phase.QUEUED


def test_of_a_cluster_that_does_not_answer_there_is_an_error_and_no_traceback(server, runs, monkeypatch):
    runs.submit(SPEC)
    monkeypatch.setenv("STRATA_BACKEND", "kubernetes")
    server.account = None
    done = CliRunner().invoke(app, ["list", "--mine"])
    assert done.exit_code == 1 and "Kubernetes does not answer the request to say who you are" in done.output
    assert not isinstance(done.exception, ConnectionError | HTTPError)


def test_outputs_on_a_volume_that_is_not_mounted_here_are_not_copied(server, runs, tmp_path):
    runs.submit(SPEC)
    with pytest.raises(NotReady, match="bot is running"):
        runs.outputs("bot")
    end(server, "Completed")
    with pytest.raises(NotReady, match=r"/runs/bot/model.* on a volume of the cluster.*set export.url"):
        runs.outputs("bot", to=tmp_path)


def test_an_unknown_run_and_logs_of_removed_pods(server, runs, caplog):
    with pytest.raises(RunNotFound, match="no run was submitted to flytesnacks-development as 'other'"):
        runs.get("other")
    runs.submit(SPEC)
    end(server, "Completed")
    with caplog.at_level(logging.WARNING):
        assert list(runs.logs("bot")) == []
    assert "the pods of bot are removed" in caplog.text


def keep(folder, host, started, *texts, attempt=0, rank=0):
    """A kept log of a pod whose lines came a second apart; the content, and the same as a later pod repeats it."""
    at = datetime.fromisoformat(started).timestamp()
    name = kept_log.file_name(at, host)
    entries = [kept_log.entry(at + second, rank, text) for second, text in enumerate(texts)]
    content = b"".join([kept_log.header(host, attempt), *entries])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    values = enumerate(map(kept_log.repeated, kept_log.parse(name, content)))
    return "".join(f"2026-11-22T00:10:00.{number}Z {progress_line.encode(each)}\n" for number, each in values)


def running(name, host, started, restart=0):
    """A pod whose container has started then."""
    found = pod(name, restart=restart)
    found["spec"]["hostname"] = host
    found["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": started}}
    return found


@pytest.mark.parametrize(
    ("on_volume", "in_store", "repeats"),
    [(True, False, False), (False, True, False), (False, False, True), (True, True, True)],
    ids=["a mounted volume", "the store", "the present pod's log", "all of them"],
)
@pytest.mark.parametrize("follow", [False, True])
def test_what_pods_that_are_gone_said_comes_before_the_present_ones_and_once(
    server, runs, tmp_path, on_volume, in_store, repeats, follow
):
    volume, store = tmp_path / "volume", tmp_path / "store"
    url = {"checkpoint": {"url": f"file://{store}"}} if in_store else {}
    runs.submit(RunSpec.model_validate(SPEC.model_dump(mode="json") | {"output": str(volume), **url}))
    repeated = keep(None, "bot-w-0-0", "2026-11-22T00:00:00Z", "first pod", "its last words") if repeats else ""
    for place in [volume] * on_volume + [store] * in_store:
        keep(place / "bot" / "logs", "bot-w-0-0", "2026-11-22T00:00:00Z", "first pod", "its last words")
        keep(place / "bot" / "logs", "bot-w-0-0", "2026-11-22T00:10:00.5Z", "present pod", attempt=1)
    server.content["pods"] = [running("bot-w-0-0-x2z", "bot-w-0-0", "2026-11-22T00:10:00Z", restart=1)]
    server.content["logs"] = {"bot-w-0-0-x2z": [f"{repeated}2026-11-22T00:10:00.6Z present pod\n"]}

    def go_on():
        if server.read:
            server.content["pods"] = []
            end(server, "Completed")

    server.after = go_on
    lines = list(runs.logs("bot", follow=follow))
    assert [(line.text, line.attempt, line.source, bool(line.kept)) for line in lines] == [
        ("first pod", 0, "bot-w-0-0", True),
        ("its last words", 0, "bot-w-0-0", True),
        ("present pod", 1, "bot-w-0-0-x2z", False),
    ]


def test_a_log_names_the_pods_that_are_gone_and_is_read_without_the_jobset_from_the_runs_folder(
    server, runs, tmp_path, monkeypatch
):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    logs = tmp_path / "bot" / "logs"
    keep(logs, "bot-w-0-0", "2026-11-22T00:00:00Z", "step 1")
    keep(logs, "bot-w-0-1", "2026-11-22T00:00:01Z", "a warning", rank=4)
    keep(logs, "bot-w-0-0", "2026-11-22T00:10:00Z", "step 2", attempt=1)
    expected = [
        "-- attempt 0, pod bot-w-0-0, which is gone, from 2026-11-22 00:00:00 --",
        "[rank 0] step 1",
        "-- attempt 0, pod bot-w-0-1, which is gone, from 2026-11-22 00:00:01 --",
        "[rank 4] a warning",
        "-- attempt 1, pod bot-w-0-0, which is gone, from 2026-11-22 00:10:00 --",
        "[rank 0] step 2",
    ]
    for backend, name in (
        ("local", tmp_path / "bot"), ("kubernetes", tmp_path / "bot"), ("kubernetes", f"file://{tmp_path}/bot/")
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["logs", str(name), "--backend", backend])
        assert done.stdout.splitlines() == expected, done.output
    done = CliRunner().invoke(app, ["logs", str(tmp_path / "bot"), "--rank", "4"])
    assert done.stdout.splitlines() == expected[2:4]
    for backend in "local", "kubernetes":
        done = CliRunner().invoke(app, ["logs", "-f", str(tmp_path / "bot"), "--backend", backend])
        assert done.exit_code == 1 and "cannot be followed: leave out --follow" in done.stderr and not done.stdout
        done = CliRunner().invoke(app, ["logs", f"{tmp_path}/other/", "--backend", backend])
        assert done.exit_code == 2 and f"error: no kept logs in {tmp_path}/other/logs: " in done.stderr


def test_a_pod_in_its_nodes_network_is_known_by_its_own_name(server, runs, tmp_path):
    runs.submit(RunSpec.model_validate(SPEC.model_dump(mode="json") | {"output": str(tmp_path)}))
    keep(tmp_path / "bot" / "logs", "bot-w-0-0-x2z", "2026-11-22T00:00:00.5Z", "hello")
    server.content["pods"] = [running("bot-w-0-0-x2z", "bot-w-0-0", "2026-11-22T00:00:00Z")]
    server.content["logs"] = {"bot-w-0-0-x2z": ["2026-11-22T00:00:00.6Z hello\n"]}
    assert [(line.text, line.kept) for line in runs.logs("bot")] == [("hello", "")]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((502, "dial tcp 10.0.0.7:10250: i/o timeout"), "i/o timeout"),
        (["unable to retrieve container logs for containerd://ab\n"], "unable to retrieve"),
    ],
    ids=["its node does not answer", "its containers are removed"],
)
def test_of_a_pod_without_its_log_the_kept_log_is_shown(server, runs, tmp_path, caplog, answer, said):
    runs.submit(RunSpec.model_validate(SPEC.model_dump(mode="json") | {"output": str(tmp_path)}))
    keep(tmp_path / "bot" / "logs", "bot-w-0-0", "2026-11-22T00:00:00.5Z", "its last words")
    server.content["pods"] = [running("bot-w-0-0-x2z", "bot-w-0-0", TIME)]
    server.content["logs"] = {"bot-w-0-0-x2z": answer}
    assert [line.text for line in runs.logs("bot")] == ["its last words"]
    assert "log of bot-w-0-0-x2z: " in caplog.text and said in caplog.text
    server.content["pods"][0]["status"]["phase"] = "Failed"
    end(server, "Failed")
    assert [line.text for line in runs.logs("bot", follow=True)] == ["its last words"]


def test_a_store_that_refuses_to_give_logs_hides_none_of_the_pods_that_exist(server, runs, tmp_path, caplog):
    (tmp_path / "bot").mkdir()
    (tmp_path / "bot" / "logs").write_text("no folder")
    url = {"checkpoint": {"url": f"file://{tmp_path}"}}
    runs.submit(RunSpec.model_validate(SPEC.model_dump(mode="json") | url))
    server.content |= {"pods": [pod("a")], "logs": {"a": [f"{TIME} hello\n"]}}
    assert [line.text for line in runs.logs("bot")] == ["hello"]


def test_no_package_of_flytes_is_needed():
    code = "import sys, strata_platform.backends.kubernetes; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"grpc", "flyteidl", "flytekit", "msgpack", "kubernetes"} & set(done.stdout.split())
