"""The first process of a pod: it starts the others, stops them together, and ends as they did."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata_platform import kept_log
from strata_platform.spec.run_spec import Topology
from tasks.runtime.launch import environments, run_processes

PYTHON = [sys.executable, "-S", "-c"]
WAIT = "import time; time.sleep(60)"
ROOT = Path(__file__).parents[2]
SOURCE = os.pathsep.join(map(str, (ROOT, ROOT / "platform")))


def test_ranks_are_those_of_torchrun(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environments("x", Topology(), 0) == [{}]
    second = environments("x", Topology(nnodes=2, nproc_per_node=4), 1)
    assert [each["RANK"] for each in second] == ["4", "5", "6", "7"]
    assert [each["LOCAL_RANK"] for each in second] == ["0", "1", "2", "3"]
    assert {each["WORLD_SIZE"] for each in second} == {"8"} and {each["OMP_NUM_THREADS"] for each in second} == {"1"}
    (only,) = environments("x", Topology(nnodes=2), 1)
    assert only["RANK"] == "1" and "OMP_NUM_THREADS" not in only


def test_all_end_well():
    codes, stopped = run_processes([*PYTHON, "pass"], [{}, {}])
    assert (codes, stopped) == ([0, 0], False)


def test_one_that_fails_ends_the_others():
    begun = time.monotonic()
    program = f"import os, sys\nif os.environ['LOCAL_RANK'] == '1': sys.exit(68)\n{WAIT}"
    codes, stopped = run_processes([*PYTHON, program], [{"LOCAL_RANK": str(rank)} for rank in range(3)])
    assert (codes, stopped) == ([-15, 68, -15], False)
    assert time.monotonic() - begun < 30


@pytest.fixture
def launch(tmp_path):
    """Starts the module, with a `tasks.runtime` that is a given program."""

    def start(program, **variables):
        package = tmp_path / "tasks" / "runtime"
        package.mkdir(parents=True)
        (package / "__main__.py").write_text(program)
        # The module itself and all that it imports are the real ones; only the processes it starts see the program.
        wrapper = (
            "import sys, tasks.runtime.launch as module\n"
            "popen = module.subprocess.Popen\n"
            f"child = [sys.executable, '-S', {str(package / '__main__.py')!r}]\n"
            "module.subprocess.Popen = lambda command, **more: popen(child, **more)\n"
            "sys.exit(module.main())"
        )
        given = {"STRATA_SPEC": json.dumps({"output": str(tmp_path / "runs")}), **variables}
        return subprocess.Popen(
            [sys.executable, "-c", wrapper], env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT,
        )  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit(69)", 69, ""),
        ("import os; os.kill(os.getpid(), 9)", 137, "error: rank 0: a process was killed by SIGKILL"),
        ("raise SystemExit(75)", 75, "error: training hung"),
    ],
)
def test_it_ends_as_its_processes_did(launch, program, code, said):
    with launch(program) as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == code
    assert errors.startswith(said) and bool(errors) == bool(said)


@pytest.mark.parametrize(("at_the_end", "code"), [("sys.exit(1)", 143), ("sys.exit(0)", 0)])
def test_a_pod_that_is_told_to_stop_ends_as_preempted_unless_its_work_is_done(launch, at_the_end, code):
    program = (
        f"import signal, sys, time\nsignal.signal(15, lambda *_: {at_the_end})\nprint('here', flush=True)\n"
        "time.sleep(60)"
    )
    with launch(program) as process:
        assert "is on the pod's own disk" in process.stdout.readline()
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
    assert process.returncode == code


def test_a_wrong_spec_is_bad_input(launch):
    with launch("", STRATA_SPEC="training: {steps: no}") as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 2 and "training.steps" in errors


def test_what_a_killed_process_printed_is_kept_in_the_runs_folder(launch, tmp_path):
    program = (
        "import logging, os, sys\nhandler = logging.StreamHandler()\n"
        "from tasks.runtime.process.kept_output import keep_output\nkeep_output()\n"
        "print('step 1', end=''); print(' of 9')\nhandler.emit(logging.makeLogRecord({'msg': 's3://me:word@host/x'}))\n"
        "print('@strata {\"steps\":9}')\nfor number in range(2000): print('line', number)\n"
        "os.kill(os.getpid(), 9)"
    )
    with launch(program, PYTHONPATH=SOURCE, STRATA_ATTEMPT="2") as process:
        process.communicate(timeout=600)
    (file,) = (tmp_path / "runs").glob("*/logs/*.jsonl")
    warned, first, *middle, last, why = kept_log.parse(file.name, file.read_bytes())
    assert "is on the pod's own disk" in warned.text
    assert (first.text, first.rank, first.attempt, first.source) == ("step 1 of 9", 0, 2, socket.gethostname())
    assert [line.text for line in middle] == ["s3://...@host/x", *(f"line {number}" for number in range(1999))]
    assert last.text == "line 1999" and why.text.startswith("error: rank 0: a process was killed by SIGKILL")


def test_a_log_that_cannot_be_kept_is_named_once_and_harms_no_run(launch):
    with launch(
        "", STRATA_SPEC='{"output": "/proc/nowhere", "checkpoint": {"url": "file:///proc/nowhere"}}'
    ) as process:
        text, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    assert [line.partition(" and will be lost")[0] for line in text.splitlines()] == [
        "this pod's log cannot be copied to /proc/nowhere/finetune/logs",
        "this pod's log cannot be copied to file:///proc/nowhere/finetune/logs",
    ]
