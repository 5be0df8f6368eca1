"""The client over processes of this machine, with a stand-in for what trains."""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import yaml

from strata_platform import commands
from strata_platform.backends.backend import find_gpu, parse_points
from strata_platform.backends.local import LocalBackend
from strata_platform.backends.run_state import RunFiles, tail
from strata_platform.backends.supervisor import Attempt
from strata_platform.client import Client
from strata_platform.commands import echo_json
from strata_platform.errors import BackendError, DoesNotFit, NotReady, RunExists, RunNotFound, StrataError, WaitTimeout
from strata_platform.estimate.gpus import GPUS, gpu_by_name
from strata_platform.outcomes import UNHEALTHY, UNREACHABLE
from strata_platform.runs import LogLine, MetricPoint, Phase, Stage
from strata_platform.spec import RunSpec
from strata_platform.testing import FakeBackend, metric_point

STRATA = Path(sys.executable).with_name("strata")
TWO = {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}}


@pytest.fixture
def behave(monkeypatch):
    return lambda how: monkeypatch.setenv("STAND_IN", how)


def give_up(number, frame):
    raise TimeoutError("what was followed did not end")


@pytest.fixture
def client(workspace):
    client = Client(LocalBackend(retries=2, grace=1), poll=0.01)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield client
    signal.alarm(60)
    for run in client.list():
        client.cancel(run.name)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def spec(name="run", **fields):
    return RunSpec.model_validate({"name": name, "output": "out", **fields})


def until_it_trains(client):
    assert "it trains" in (line.text for line in client.logs("run", follow=True))


def test_a_run_from_its_submission_to_its_outputs(client, behave, workspace):
    behave("finishes")
    run = client.submit(spec())
    assert (run.name, run.backend, run.where) == ("run", "local", str(workspace / "out" / "run"))
    assert not run.is_done

    seen = []
    ended = client.wait("run", timeout=600, show=seen.append)
    assert (ended.phase, ended.stage, ended.message) == (Phase.SUCCEEDED, None, "")
    assert (ended.step, ended.steps, ended.restarts, ended.eta) == (3, 3, 0, None)
    assert ended.submitted <= ended.started <= ended.ended
    assert {run.stage for run in seen} <= {Stage.STARTING, Stage.TRAINING, Stage.EXPORTING}

    assert [(line.rank, line.text) for line in client.logs("run")] == [
        (0, "rank 0, start 1"), (0, "100 %"), (0, "no end of line"),
    ]  # fmt: skip
    points = list(client.metrics("run"))
    assert [(point.step, point.loss, point.metrics) for point in points] == [
        (step, 10.0 / step, {"reward": 0.5}) for step in (1, 2, 3)
    ]
    assert [event.reason for event in client.events("run")] == ["Submitted", "Started", "Stage", "Stage", "Succeeded"]
    assert client.list() == [ended]

    assert client.outputs("run").model == str(workspace / "out" / "run" / "model")
    copied = client.outputs("run", to=workspace / "mine")
    assert (Path(copied.model) / "config.json").read_text() == "{}"
    assert {path.name for path in (workspace / "mine").iterdir()} == {"model", "report.html", "record.json"}
    with pytest.raises(BackendError, match=r"mine/model, .* exists already; give another folder"):
        client.outputs("run", to=workspace / "mine")
    (workspace / "my.yaml").touch()
    with pytest.raises(BackendError, match=r"the folder .*my\.yaml cannot be created: .*; give another"):
        client.outputs("run", to=workspace / "my.yaml")


def test_a_run_that_stopped_early_says_so(client, behave, capsys, monkeypatch):
    behave("stops early")
    client.submit(spec())
    ended = client.wait("run", timeout=600)
    assert (ended.phase, ended.step, ended.steps, ended.stopped_early) == (Phase.SUCCEEDED, 3, 10, 3)
    assert ended.eval_loss == 1.25
    assert [point.step for point in client.metrics("run")] == [1, 2, 3]
    told = [(event.reason, event.message) for event in client.events("run")][-2:]
    assert told == [
        ("StoppedEarly", "after step 3"),
        ("Succeeded", "stopped early after step 3, measured and exported"),
    ]
    monkeypatch.setattr(commands, "connect", lambda *arguments, **options: client)
    commands.get("run")
    assert "step 3/10  loss 3.3333  validation loss 1.2500  stopped early" in capsys.readouterr().out


def test_below_the_log_a_terminal_shows_what_the_run_does(monkeypatch, capsys):
    """Lines of the log stay whole: the status is removed before each of them, and at the end."""
    lines = [LogLine(1.0, 0, "a line of the log"), LogLine(2.0, 0, "another")]
    script = [Stage.TRAINING, metric_point(1, 2.0), lines[0], metric_point(2, 1.0), lines[1], Phase.SUCCEEDED]
    monkeypatch.setattr("strata_platform.client._SHOW_SECONDS", 0.0)
    following = Client(FakeBackend(script), poll=0.0)
    following.submit(spec())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    commands._print_log(following, "run", follow=True, times=False, rank=None)
    written = capsys.readouterr().out
    assert "run training  step 1" in written
    assert [line.rpartition("\r\x1b[K")[2] for line in written.split("\n")] == [
        "[rank 0] a line of the log", "[rank 0] another", "",
    ]  # fmt: skip


def test_a_text_that_looks_like_a_stage_is_a_line(client, behave):
    behave("prints a text")
    client.submit(spec())
    assert client.wait("run", timeout=600).phase is Phase.SUCCEEDED
    assert [line.text for line in client.logs("run")] == ["rank 0, start 1", '@strata {"stage": "boom"}']
    assert [event.reason for event in client.events("run")] == ["Submitted", "Started", "Succeeded"]


@pytest.mark.parametrize("shape", [{}, TWO], ids=["one process", "two processes"])
def test_a_killed_process_starts_the_run_again_and_those_who_follow_see_all_of_it(client, behave, shape):
    behave("is killed once")
    client.submit(spec(**shape))
    lines, points = client.logs("run", follow=True), client.metrics("run", follow=True)
    ranks = range(spec(**shape).topology.world_size)
    said = {line.text for line in lines if line.rank is not None}
    assert said == {f"rank {rank}, start {start}" for rank in ranks for start in (1, 2)}
    assert [(point.step, point.attempt) for point in points] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    run = client.get("run")
    assert (run.phase, run.restarts) == (Phase.SUCCEEDED, 1)
    died = next(event for event in client.events("run") if event.reason == "Died")
    assert (died.kind, died.message) == ("warning", "a process was killed by SIGKILL")
    times = [line.time for line in client.logs("run")]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("how", "shape", "starts", "message"),
    [
        ("is refused", {}, 1, "data.source 'x' is no file\n  give another"),
        ("is refused", TWO, 1, "data.source 'x' is no file\n  give another"),
        ("breaks", {}, 1, "RuntimeError: it is broken"),
        ("hangs", {}, 3, "given up after 3 starts: training hung"),
    ],
    ids=["refused", "refused by two", "broken", "hung again and again"],
)
def test_a_run_that_fails_says_why(client, behave, how, shape, starts, message):
    behave(how)
    client.submit(spec(**shape))
    run = client.wait("run", timeout=600)
    assert run.phase is Phase.FAILED
    assert run.message.startswith(message)
    assert sum(event.reason == "Started" for event in client.events("run")) == starts
    with pytest.raises(NotReady, match="run is failed"):
        client.outputs("run")


@pytest.mark.parametrize("shape", [{}, TWO], ids=["one process", "two processes"])
@pytest.mark.parametrize("outcome", [UNREACHABLE, UNHEALTHY], ids=lambda outcome: outcome.kind)
def test_a_run_is_repeated_where_flyte_repeats_it(client, behave, monkeypatch, outcome, shape):
    behave("exits once")
    monkeypatch.setenv("STAND_IN_CODE", str(outcome.exit_code))
    client.submit(spec(**shape))
    run = client.wait("run", timeout=600)
    assert (run.phase, run.restarts) == (Phase.SUCCEEDED, 1)
    died = next(event for event in client.events("run") if event.reason == "Died")
    assert died.message == f"{outcome.message}: it is not to be had now"


def test_of_two_submissions_of_a_name_at_once_one_is_refused(client, behave, monkeypatch):
    behave("goes on")
    check = LocalBackend._require_free_name

    def check_and_dawdle(*arguments):
        check(*arguments)
        time.sleep(0.5)

    monkeypatch.setattr(LocalBackend, "_require_free_name", check_and_dawdle)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(client.submit, spec(output=folder)) for folder in ("out", "other")]
        errors = [submission.exception() for submission in asked]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "RunExists"]
    assert len(client.list()) == 1


@pytest.mark.parametrize("how", ["goes on", "goes on in spite of SIGTERM"])
def test_a_run_is_canceled_and_continued_by_submitting_it_again(client, behave, how):
    behave(how)
    client.submit(spec())
    until_it_trains(client)
    run = client.get("run")
    assert (run.phase, run.stage, run.step, run.steps) == (Phase.RUNNING, Stage.TRAINING, 1, 10)
    assert run.eta == pytest.approx(9 * 2.0)
    assert client.cancel("run").phase is Phase.ABORTED
    assert client.cancel("run").phase is Phase.ABORTED
    killed = any(event.reason == "Killed" for event in client.events("run"))
    assert killed == (how != "goes on")

    behave("finishes")
    client.submit(spec())
    assert client.wait("run", timeout=600).phase is Phase.SUCCEEDED
    assert [line.text for line in client.logs("run")][:3] == ["rank 0, start 1", "it trains", "rank 0, start 2"]
    assert len(client.list()) == 1


def test_a_supervisor_that_is_killed_leaves_no_process_and_no_run_that_seems_to_go_on(client, behave):
    behave("goes on")
    run = client.submit(spec())
    until_it_trains(client)
    lines = client.logs("run", follow=True)
    assert next(lines).text == "rank 0, start 1"
    supervisor = RunFiles(Path(run.where)).state().pid
    trainer = os.pidfd_open(int(subprocess.check_output(["pgrep", "-P", str(supervisor)])))
    os.kill(supervisor, signal.SIGKILL)
    assert [line.text for line in lines] == ["it trains"]
    # Readable when the process has ended.
    assert select.select([trainer], [], [], 60)[0]
    ended = client.wait("run", timeout=600)
    assert ended.phase is Phase.INTERRUPTED
    assert ended.message.startswith("its processes are gone")

    behave("finishes")
    client.submit(spec())
    assert client.wait("run", timeout=600).phase is Phase.SUCCEEDED


def test_a_supervisor_that_is_told_to_stop_interrupts_the_run(client, behave):
    behave("goes on")
    run = client.submit(spec())
    until_it_trains(client)
    os.kill(RunFiles(Path(run.where)).state().pid, signal.SIGTERM)
    ended = client.wait("run", timeout=600)
    assert (ended.phase, ended.message.partition(";")[0]) == (Phase.INTERRUPTED, "ended by SIGTERM")


def test_a_name_is_one_run(client, behave, workspace):
    behave("goes on")
    client.submit(spec())
    for again in (spec(), spec(output="elsewhere")):
        with pytest.raises(RunExists, match=r"'run' has not ended, in .*/out/run; follow it") as caught:
            client.submit(again)
        assert (caught.value.status, caught.value.reason) == (409, "AlreadyExists")
    client.cancel("run")
    behave("finishes")
    client.submit(spec(output="elsewhere"))
    assert client.wait("run", timeout=600).where == str(workspace / "elsewhere" / "run")
    # The first one has lost the name, and is found by its folder.
    assert client.get(str(workspace / "out" / "run")).phase is Phase.ABORTED


def test_what_is_not_there_is_reported(client, behave):
    for verb in (client.get, client.wait, client.logs, client.metrics, client.events, client.cancel, client.outputs):
        with pytest.raises(RunNotFound, match=r"no run was submitted here as 'missing'; runs: none") as caught:
            verb("missing")
        assert (caught.value.status, caught.value.reason) == (404, "NotFound")
    assert client.list() == []
    with pytest.raises(BackendError, match=r"topology.nnodes is 2, and this is one machine"):
        client.submit(spec(topology={"nnodes": 2}, parallel={"type": "ddp"}))
    behave("goes on")
    client.submit(spec())
    with pytest.raises(WaitTimeout, match=r"run has not ended after 0 s and is still in progress"):
        client.wait("run", timeout=0)
    with pytest.raises(NotReady, match="run is running"):
        client.outputs("run")
    assert issubclass(WaitTimeout, StrataError)


class OnA100(LocalBackend):
    """This machine, if it had such a GPU."""

    def gpu(self, resources):
        return GPUS["a100-40gb"]


LARGE = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "objective": {"type": "pretrain"}}


def test_what_cannot_fit_is_refused_unless_told_otherwise(workspace, behave):
    behave("finishes")
    client = Client(OnA100(), poll=0.01)
    with pytest.raises(DoesNotFit, match=r"needs [\d.]+ GiB on each GPU, and .* 38.8; this layout fits: .* GPUs"):
        client.submit(spec(**LARGE))
    assert client.list() == []
    client.submit(spec(**LARGE), force=True)
    assert client.wait("run", timeout=600).phase is Phase.SUCCEEDED
    assert client.estimate(spec(**LARGE), GPUS["b200"]).fits


def test_what_is_in_host_memory_takes_none_of_the_gpu(workspace, behave, caplog):
    behave("finishes")
    topology = {"topology": {"nproc_per_node": 2}}
    client = Client(OnA100(), poll=0.01)
    with pytest.raises(DoesNotFit):
        client.submit(spec(**LARGE, **topology, parallel={"type": "fsdp"}))
    client.submit(spec(**LARGE, **topology, parallel={"type": "fsdp", "cpu_offload": True}))
    assert "whether the run fits" not in caplog.text
    client.wait("run", timeout=600)


@pytest.mark.parametrize(
    ("adapter", "model", "doubted"),
    [
        ({"use_dora": True}, "Llama-3.2-1B", True),
        ({"lora_dropout": 0.1}, "Llama-3.2-1B", True),
        ({"target_modules": ["q_proj"]}, "Llama-3.2-1B", False),
        ({"target_modules": ["q_proj"]}, "Llama-3.1-70B", True),
        ({}, "Llama-3.2-1B", False),
    ],
)
def test_of_an_adapter_that_is_not_counted_whole_it_is_not_known_whether_it_fits(
    workspace, behave, caplog, adapter, model, doubted
):
    behave("finishes")
    client = Client(OnA100(), poll=0.01)
    client.submit(spec(model={"name": f"meta-llama/{model}"}, adapter={"type": "lora", **adapter}))
    assert ("cannot estimate whether the run fits: " in caplog.text) is doubted
    assert not doubted or f"adapter.{next(iter(adapter))}" in caplog.text
    client.wait("run", timeout=600)


def test_what_takes_more_than_is_counted_does_not_fit_where_that_does_not(workspace, behave):
    dora = {"model": {"name": "meta-llama/Llama-3.1-70B"}, "adapter": {"type": "lora", "use_dora": True}}
    with pytest.raises(DoesNotFit):
        Client(OnA100(), poll=0.01).submit(spec(**dora))


def test_a_run_whose_supervisor_is_elsewhere_is_not_canceled_by_its_number(client, behave):
    behave("goes on")
    run = client.submit(spec())
    until_it_trains(client)
    files = RunFiles(Path(run.where))
    there = files.state()
    # A process that has the number of a supervisor on another machine.
    files.set_state(replace(there, pid=os.getpid()))
    with pytest.raises(BackendError, match=rf"process {os.getpid()}, is not on this machine"):
        client.cancel("run")
    files.set_state(there)


def test_a_loss_that_is_not_finite_is_null_in_json(capsys):
    echo_json({"loss": math.nan, "step": 3})
    assert capsys.readouterr().out == '{"loss":null,"step":3}\n'


def test_a_gpu_of_an_unknown_kind_is_reported(caplog):
    assert find_gpu("NVIDIA GeForce RTX 4090") is None
    assert "cannot estimate whether the run fits: NVIDIA GeForce RTX 4090 is not among h200," in caplog.text


def test_a_driver_that_does_not_answer_is_told_and_none_at_all_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert LocalBackend().gpu(spec().resources) is None
    assert not caplog.text
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'; exit 9\n")
    driver.chmod(0o755)
    assert LocalBackend().gpu(spec().resources) is None
    assert "nvidia-smi failed: NVIDIA-SMI has failed: no driver" in caplog.text


def test_points_of_another_version_are_told_once(caplog):
    point = {field.name: 1 for field in fields(MetricPoint) if field.default is field.default_factory is MISSING}
    assert [found.loss for found in parse_points([{"step": 1}, point, {"step": 2}, {**point, "newer": 2}])] == [1, 1]
    assert caplog.text.count("left out") == 1


def test_a_model_of_unknown_shape_is_submitted_with_a_warning(workspace, behave, caplog):
    behave("finishes")
    client = Client(OnA100(), poll=0.01)
    client.submit(spec(model={"name": "owner/unheard-of"}))
    assert "cannot estimate whether the run fits: model.name" in caplog.text
    client.wait("run", timeout=600)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA-H200", "h200"), ("NVIDIA-H100-80GB-HBM3", "h100"),
        ("NVIDIA-A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"), ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", None), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_kinds_of_gpus_by_their_drivers_names(name, kind):
    assert gpu_by_name(name) == (kind and GPUS[kind])


@pytest.mark.parametrize(
    ("codes", "again"),
    [
        ([], True), ([2, -15], False), ([1], False), ([1, -15], False), ([-9, 1], True), ([75, -15], True), ([143],
        True), ([-15, 143], True), ([-11], True), ([-35], True), ([68, -15], True), ([1, 68], True), ([69], True), ([68,
        2], False),
    ],
)  # fmt: skip
def test_what_is_started_again(codes, again):
    attempt = Attempt(0)
    for code in codes:
        attempt.add_stderr(None, f"  exitcode  : {code} (pid: 17)")
    assert attempt.outcome(-9).retryable == again


def test_lines_that_a_kill_has_torn_are_left_out_and_harm_no_other(tmp_path):
    file = tmp_path / "lines.jsonl"
    over = iter([False, False, True])
    parts = iter(['1}\n{"b": 2}\n{"to', 'rn\n{"c": 3}\n'])
    file.write_text('{"a": ')

    def grow():
        with file.open("a") as opened:
            opened.write(next(parts))

    assert list(tail(file, lambda: next(over), grow)) == [{"a": 1}, {"b": 2}, {"c": 3}]


def strata(*arguments, **options):
    return subprocess.run([STRATA, *arguments], capture_output=True, text=True, timeout=600, **options)


@pytest.mark.parametrize("option", [("--timeout", "nan"), ("--timeout", "inf"), ("--poll", "inf")], ids=" ".join)
def test_times_that_never_pass_are_refused(workspace, option):
    ended = strata("wait", "mine", *option)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert option[0] in ended.stderr and "is not a finite number of at least 0" in ended.stderr


def test_the_commands(workspace, behave):
    behave("finishes")
    Path("my.yaml").write_text(yaml.safe_dump({"name": "mine", "output": "out"}))
    submitted = strata("submit", "my.yaml", "--follow", "--poll", "0.05")
    assert submitted.returncode == 0, submitted.stderr
    told = submitted.stdout.splitlines()
    assert told[0] == f"mine is submitted: {workspace}/out/mine"
    assert told[1:3] == ["[rank 0] rank 0, start 1", "[rank 0] 100 %"]
    assert told[-1] == "mine succeeded, outputs: strata outputs mine"

    assert strata("list").stdout.splitlines()[1].split()[:4] == ["mine", "succeeded", "step", "3/3"]
    assert json.loads(strata("get", "mine", "--format", "json").stdout)["phase"] == "succeeded"
    assert "  phase     succeeded\n" in strata("get", "mine").stdout
    assert strata("metrics", "mine").stdout.splitlines()[2] == (
        "step 3  loss 3.3333  reward 0.500  lr 1.00e-03  100 tok/s"
    )
    assert "Started      start 1 of at most 6" in strata("events", "mine").stdout
    assert strata("outputs", "mine").stdout.split()[:2] == ["model", f"{workspace}/out/mine/model"]
    missing = strata("logs", "other")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "error: no run was submitted here as 'other'; runs: mine\n"


def test_ctrl_c_ends_the_looking_and_not_the_run(client, behave):
    behave("goes on")
    client.submit(spec())
    until_it_trains(client)
    with subprocess.Popen([STRATA, "logs", "-f", "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as looking:
        assert looking.stdout.readline() == b"[rank 0] rank 0, start 1\n"
        looking.send_signal(signal.SIGINT)
        assert b"run continues: strata logs -f run" in looking.stderr.read()
    assert looking.returncode == 130
    assert client.get("run").phase is Phase.RUNNING
    assert strata("cancel", "run").stdout == "run is aborted\n"
    waited = strata("wait", "run")
    assert waited.returncode == 1
    assert waited.stderr == "run aborted: canceled; submit it again to continue from its last checkpoint\n"
