"""How an attempt ends decides what Flyte does next: the cluster's doing is retried, the user's error is not."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from strata_platform import kept_log
from strata_platform.spec import RunSpec
from tasks import elastic, finish, topology
from tasks.runtime.process import forks
from tasks.runtime.run_folder import kept_logs
from tasks.steps.train_step import wait_for_main_pod
from tests.helpers import fork_server

ROOT = Path(__file__).parents[2]

CODE = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from tasks.steps import train_step
where, how, start_method = sys.argv[3:]
if where == "cluster":
    os.environ.update(train_step.ENVIRONMENT)
from flytekit.exceptions.user import FlyteRecoverableException
from tasks import elastic
from tests.helpers.rendezvous_events import name_methods_cheaply
from tests.workflows.helpers.elastic_tasks import run
name_methods_cheaply()
elastic.is_local = lambda: where == "local"
if how == "killed":
    elastic.MemoryKills = lambda: SimpleNamespace(sentence=lambda asked: f"the container's memory was used up, {asked}")
try:
    print("RESULT", run(sys.argv[1], Path(sys.argv[2]), how or "run", start_method))
except FlyteRecoverableException as error:
    print("RECOVERABLE", error)
except BaseException as error:
    print("FATAL", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("name", "where", "says"),
    [
        ("finishes", "local", ("RESULT Result(record=\"0 of 2, ['shard']\"",)),
        (
            "is_killed",
            "local",
            ("RECOVERABLE", "a process was killed by SIGKILL; the machine is gone", "run the same command again"),
        ),
        ("is_preempted", "local", ("RECOVERABLE", "stopped by SIGTERM")),
        (
            "whose_pod_is_stopped",
            "local",
            ("RECOVERABLE", "the pod was stopped by SIGTERM"),
        ),
        # As what Flyte leaves no error for: the attempt may go on when the job is resumed.
        ("whose_pod_is_stopped", "cluster", ("the pod was stopped by SIGTERM", "FATAL SystemExit 143")),
        # Forked from the agent, whose handler of SIGTERM it does not have.
        ("is_killed_by_sigterm", "cluster", ("RECOVERABLE", "Signal 15 (SIGTERM) received by PID")),
        # The agent starts each process three times, the last two times in vain.
        (
            "cannot_train",
            "cluster",
            (
                "FATAL",
                "ValueError: FileNotFoundError: model.name 'no/model' is not on the Hub",
                'raise FileNotFoundError("model.name',
            ),
        ),
        ("is_misused", "local", ("FATAL", "training.micro_batch_size is too large")),
        # The agent may tell of the other process, which lost this one.
        ("loses_a_peer by mistake", "local", ("FATAL", "ValueError: training.micro_batch_size is too large")),
        ("loses_a_peer killed", "local", ("RECOVERABLE", "the container's memory was used up")),
    ],
)
def test_end_of_an_attempt(name, where, says, tmp_path):
    (tmp_path / "shard").touch()
    name, _, how = name.partition(" ")
    # An agent that is told to stop is an interpreter of its own, and on one machine so are its workers: what a signal
    # raises within a fork is lost. The others are forks for the sake of time. In a pod all workers are forks of an
    # agent that has asked for no GPU, as the tests' server has.
    start, method = (subprocess.run, "spawn") if name == "whose_pod_is_stopped" else (fork_server.run, "fork")
    # In a process of its own: the agent takes signals, and one of the tasks sends it one.
    ended = start(
        [sys.executable, "-c", CODE, name, str(tmp_path), where, how.replace(" ", "-"), method],
        cwd=ROOT,
        env=fork_server.clean_environment(),
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    for words in says:
        assert words in ended.stdout
    if name == "cannot_train":
        # The first process to end takes the other one with it.
        assert (tmp_path / "starts").read_text().count("a start") <= 2
    assert "import everything again" not in ended.stdout
    kept = [kept_log.parse(file.name, file.read_bytes()) for file in tmp_path.glob("*/logs/*.jsonl")]
    assert len(kept) == (where == "cluster")
    if kept and name == "whose_pod_is_stopped":
        lines = {(line.rank, line.text) for line in kept[0]}
        # Of the agent and of its processes, of which the second may not have come as far.
        assert (0, "at work") in lines and any(says[0] in text for rank, text in lines if rank is None)


def test_a_pod_that_evaluates_keeps_its_log(tmp_path, monkeypatch):
    def fail(spec, record, weights, data):
        raise ValueError("the record is of another run")

    monkeypatch.setattr(finish, "is_local", lambda: False)
    for module in (finish, kept_logs):
        monkeypatch.setattr(module, "configure_logging", lambda: None)
    monkeypatch.setattr(finish.steps, "finish", fail)
    # pytest has threads, which a fork would not have.
    monkeypatch.setattr(finish.forks, "fork_server", lambda what: nullcontext())
    spec, folder = RunSpec(output=str(tmp_path)), FlyteDirectory(str(tmp_path))
    with pytest.raises(ValueError, match="another run"):
        finish.finish.task_function(spec=spec, record=None, weights=folder, data=folder)
    (file,) = tmp_path.glob("*/logs/*.jsonl")
    assert kept_log.parse(file.name, file.read_bytes())[-1].text == "ValueError: the record is of another run"


@pytest.mark.parametrize(
    ("processes", "error", "expected"),
    [
        (2, RuntimeError("Connection closed by peer"), FlyteRecoverableException),
        (2, torch.distributed.DistBackendError("NCCL communicator was aborted"), FlyteRecoverableException),
        (1, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (2, torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (2, ValueError("training.micro_batch_size is too large"), ValueError),
        (1, RuntimeError("CUDA error: uncorrectable ECC error encountered"), FlyteRecoverableException),
        (2, RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
    ],
    ids=["lost peer", "NCCL", "alone", "out of memory", "misused", "broken GPU", "wrong token"],
)
def test_a_process_that_may_have_lost_a_peer_is_tried_again(monkeypatch, processes, error, expected):
    def session(spec):
        raise error

    monkeypatch.setattr("tasks.runtime.training.session.session", session)
    spec = RunSpec.model_validate(
        {"topology": {"nproc_per_node": processes}, "parallel": {"type": "ddp" if processes > 1 else "single"}}
    )
    with pytest.raises(expected):
        topology._train(spec, FlyteDirectory("data"))


@pytest.mark.parametrize(
    ("driver", "torch_asked", "expected"),
    [(0, False, True), (3, False, False), (100, False, True), (0, True, False), (None, True, True)],
    ids=["unused", "used without torch", "no GPU", "used by torch", "no driver"],
)
def test_processes_are_forked_where_forks_can_use_gpus(monkeypatch, driver, torch_asked, expected):
    """The driver's answers to a process that starts it: 0, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NO_DEVICE."""

    def library(name):
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=lambda flags: driver)

    monkeypatch.setattr(forks.ctypes, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: torch_asked)
    assert forks._forks_may_use_gpus() is expected


def test_a_pod_that_is_done_waits_until_it_is_stopped():
    stop = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    stop.start()
    wait_for_main_pod()
    stop.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_is_stopped_on_this_machine_shows_one_traceback(monkeypatch):
    """pyflyte prints that of each cause."""
    monkeypatch.setattr(elastic, "is_local", lambda: True)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        with pytest.raises(FlyteRecoverableException, match="stopped; run the same command again to continue") as shown:
            elastic._stopped("stopped", error)
    assert shown.value.__cause__ is None and shown.value.__suppress_context__
