"""A process that makes no step leaves its stacks, says who is at fault, and ends."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from strata_platform.outcomes import HUNG
from strata_platform.spec import RunSpec
from tasks.runtime.process.watchdog import Watchdog, summary
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tests.helpers import fork_server

ROOT = Path(__file__).parents[3]


def start(how, folder, rank=0):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.helpers.hanging_process", how, str(folder), str(rank)],
        cwd=ROOT, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_all_processes_leave_their_stacks_and_one_tells_who_is_where(tmp_path):
    both = start("waits_for_the_other", tmp_path, 0), start("reads_from_a_disk_that_is_gone", tmp_path, 1)
    said = [process.communicate(timeout=600)[1] for process in both]
    assert [process.returncode for process in both] == [HUNG.exit_code] * 2
    assert "[rank 1] step 3 is not done after" in said[1]
    assert "tests/runtime/helpers/hanging_process.py" in said[1]
    for rank, function in enumerate(("waits_for_the_other", "reads_from_a_disk_that_is_gone")):
        stacks = (tmp_path / f"rank-{rank}.txt").read_text()
        assert "step 3 is not done after" in stacks
        assert f"in {function}" in stacks
    assert "step 3 is not done: process 0 is at threading.Condition.wait" in said[0]
    assert "called by __main__.waits_for_the_other" in said[0]
    assert "; process 1 is at threading" in said[0]
    assert "Stacks are in" not in said[1]


def test_native_code_that_keeps_the_interpreters_lock_is_ended_too(tmp_path):
    process = start("holds_the_interpreters_lock", tmp_path)
    _, said = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGALRM
    assert "in holds_the_interpreters_lock" in said
    assert list(tmp_path.iterdir()) == []


def test_who_is_alone_somewhere_comes_first():
    places = dict.fromkeys(range(20), "all_reduce") | {7: "read"}
    del places[11]
    assert summary(places, 20) == (
        "process 7 is at read; processes 0, 1, 2, 3, 4, 5, 6, 8 and 10 more are at all_reduce; "
        "process 11 did not report"
    )


def test_without_a_limit_nothing_is_watched(tmp_path):
    watchdog = Watchdog(tmp_path, 0, 1, 0)
    watchdog.start()
    watchdog.expect("step 1")
    watchdog.close()
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_process_that_hangs_in_training_ends_the_attempt_and_the_next_one_finishes(tmp_path):
    spec = RunSpec.model_validate(
        {
            "name": "hangs",
            "output": str(tmp_path),
            "data": {"sequence_length": 32, "max_samples": 60},
            "training": {"steps": 4, "micro_batch_size": 1},
            "checkpoint": {"every": 2},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": "torch"},
            "parallel": {"type": "ddp"},
            "topology": {"nproc_per_node": 2},
        }
    )
    file = tmp_path / "spec.json"
    file.write_text(spec.model_dump_json())
    command = ["tests.runtime.helpers.elastic_forked", "2", "1", "tests.runtime.helpers.hang_in_training", str(file)]
    ended = fork_server.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=fork_server.clean_environment(), text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = re.search(r"step 4 is not done: process .*; process .* Stacks are in .*", ended.stdout)
    assert said and "called by __main__.hang:" in said[0], ended.stdout
    folder = RunFolder.of(spec)
    assert "in all_reduce" in (folder.hangs / "attempt-0" / "rank-0.txt").read_text()
    assert "in hang" in (folder.hangs / "attempt-0" / "rank-1.txt").read_text()
    assert CompletionRecord.load(folder.record).restarts == 1
    assert [point.step for point in read_points(folder.metrics)] == [1, 2, 3, 4]
