"""A pod's log is kept in its run's folder and in the store: its start, its newest end, and the error that ended it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from strata_platform import kept_log, progress_line
from strata_platform.spec import RunSpec
from tasks.runtime.process import kept_output
from tasks.runtime.process.kept_output import VARIABLE, OutputFile
from tasks.runtime.run_folder import kept_logs as module
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.kept_logs import (
    Excerpt,
    OutputReader,
    copy_preparation_logs,
    kept_logs,
    repeated_lines,
)
from tasks.runtime.training.session import _locked_folder


@pytest.fixture(autouse=True)
def no_logging(monkeypatch):
    monkeypatch.setattr(module, "configure_logging", lambda: None)


def spec(tmp_path, **changes):
    return RunSpec.model_validate({"name": "bot", "output": str(tmp_path / "runs"), **changes})


def texts(content):
    return [line.text for line in kept_log.parse("log", content)]


def test_of_a_long_log_the_start_and_the_newest_end_stay():
    lines = [kept_log.entry(float(number), 0, f"line {number}") for number in range(1000)]
    excerpt = Excerpt(10 * len(lines[0]), 20 * len(lines[-1]))
    for line in lines:
        excerpt.add(line)
    found = texts(excerpt.content())
    assert found[0] == "line 0" and found[-1] == "line 999" and len(excerpt.content()) < 40 * len(lines[-1])
    (gap,) = (number for number, text in enumerate(found) if text.endswith("lines are not kept ..."))
    assert found[gap] == f"... {1000 - len(found) + 1} lines are not kept ..."


def test_all_gaps_of_a_log_are_said_once_at_each_place():
    line, unknown = kept_log.entry(5.0, 0, "a line"), kept_log.dropped(None)
    excerpt = Excerpt(0, len(line) + len(unknown))
    for each in (line, line, unknown, line, line, unknown):
        excerpt.add(each)
    assert texts(excerpt.content()) == [
        "... more than 3 lines are not kept ...",
        "a line",
        "... lines are not kept ...",
    ]
    assert texts(kept_log.dropped(2) + kept_log.dropped(3) + line)[0] == "... 5 lines are not kept ..."
    name = kept_log.file_name(60.0, "bot-w-0-0")
    assert [line.time for line in kept_log.parse(name, unknown)] == [60.0]


def test_of_two_processes_with_the_same_pid_neither_loses_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_output, "SEGMENT_BYTES", 150)
    reader = OutputReader(tmp_path)
    for process in "one", "two":
        file = OutputFile(tmp_path, lambda: 0)
        for number in range(4):
            file.add(f"{process} {number}")
            assert texts(b"".join(reader.lines())) == [f"{process} {number}"]
        file.close()


def test_all_lines_of_a_process_are_read_once_and_what_it_deleted_before_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_output, "SEGMENT_BYTES", 200)
    file, reader = OutputFile(tmp_path, lambda: 0), OutputReader(tmp_path)
    found = []
    for number in range(20):
        file.add(f"line {number}")
        if number % 3 == 0:
            found += texts(b"".join(reader.lines()))
    found += texts(b"".join(reader.lines()))
    assert found == [f"line {number}" for number in range(20)] and len(list(tmp_path.iterdir())) == 1
    for number in range(20, 200):
        file.add(f"line {number}")
    first, *_, last = texts(b"".join(reader.lines()))
    assert first == "... lines are not kept ..." and last == "line 199"
    file.close()


def test_a_pods_log_is_in_the_runs_folder_and_in_the_store_with_the_error_that_ended_it(
    tmp_path, monkeypatch, capsys, caplog
):
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    monkeypatch.setattr(module, "HEAD_BYTES", 100)
    here = spec(tmp_path, checkpoint={"url": f"file://{tmp_path}/store"})

    def end():
        with kept_logs(here, 4):
            print("said", file=sys.stderr)
            raise ValueError("s3://me:word@host is wrong")

    with pytest.raises(ValueError):
        end()
    print("later")
    (file,) = RunFolder.of(here).logs.iterdir()
    (copy,) = (tmp_path / "store" / "bot" / "logs").iterdir()
    assert copy.name == file.name and copy.read_bytes() == file.read_bytes()
    first, *trace, last = kept_log.parse(file.name, file.read_bytes())
    assert (first.text, first.rank, first.attempt, first.source) == ("said", 4, 1, socket.gethostname())
    assert trace[0].text.startswith("Traceback") and last.text == "ValueError: s3://...@host is wrong"
    assert VARIABLE not in os.environ
    # Under hostNetwork the host's name is the node's.
    monkeypatch.setenv("STRATA_POD", "bot-w-0-0-x2z")
    with kept_logs(here):
        print("of another pod")
    (other,) = set(RunFolder.of(here).logs.iterdir()) - {file}
    assert other.name.endswith("Z-bot-w-0-0-x2z.jsonl")
    assert {line.source for line in kept_log.parse(other.name, other.read_bytes())} == {"bot-w-0-0-x2z"}


def test_a_pod_that_is_killed_in_its_first_seconds_leaves_what_it_said_until_then(tmp_path):
    program = (
        "import sys, time\nfrom strata_platform.spec import RunSpec\n"
        "from tasks.runtime.run_folder.kept_logs import kept_logs\n"
        "with kept_logs(RunSpec(name='bot', output=sys.argv[1])):\n"
        "    print('rows.jsonl is read', flush=True)\n    time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        while process.stdout.readline() not in ("rows.jsonl is read\n", ""):
            pass
        end = time.monotonic() + 0.7 * module.VOLUME_SECONDS
        while not (found := list(tmp_path.glob("bot/logs/*.jsonl"))) and time.monotonic() < end:
            time.sleep(0.1)
        # As the kernel does for memory.
        process.kill()
    assert texts(found[0].read_bytes())[-1] == "rows.jsonl is read"


def test_sigterm_while_the_end_is_copied_undoes_nothing(tmp_path, monkeypatch, capsys):
    def write(path, content):
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(number, frame):
        raise RuntimeError("as the handler that torch's agent leaves behind")

    monkeypatch.setattr(module, "_write", write)
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        with kept_logs(spec(tmp_path)):
            print("done")
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert VARIABLE not in os.environ


def test_a_copy_that_fails_leaves_no_folder_and_no_variable_behind(tmp_path, monkeypatch, capsys):
    original = module.LogKeeper.close

    def close(keeper):
        original(keeper)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.LogKeeper, "close", close)
    with pytest.raises(KeyboardInterrupt), kept_logs(spec(tmp_path)):
        folder = os.environ[VARIABLE]
    assert VARIABLE not in os.environ and not os.path.exists(folder) and "write" not in vars(sys.stdout)


def test_the_next_pod_repeats_what_the_lost_one_said_last(tmp_path, monkeypatch, capsys):
    here = spec(tmp_path)
    logs = RunFolder.of(here).logs
    logs.mkdir(parents=True)
    lost = kept_log.file_name(0.0, "bot-w-0-0")
    lines = [kept_log.entry(float(number), 0, f"line {number}") for number in range(300)]
    (logs / lost).write_bytes(b"".join([kept_log.header("bot-w-0-0", 0), *lines]))
    (logs / "notes.jsonl").write_text("not a kept log")
    # More than it looks at, of pods that did not train.
    for number in range(module.REPEATED_PODS):
        other = kept_log.file_name(60.0 + number, "bot-n0-0", ("plan", "prepare", "finish")[number % 3])
        (logs / other).write_bytes(kept_log.header("bot-n0-0", 0) + kept_log.entry(99.0, None, "of no training"))
    monkeypatch.setenv(progress_line.VARIABLE, "1")
    with kept_logs(here), _locked_folder(here, RunFolder.of(here), None, []):
        print("of this pod")
    said = [progress_line.decode(line) or {} for line in capsys.readouterr().out.splitlines()]
    found = [line for values in said if (line := kept_log.original(values))]
    assert [line.text for line in found] == [f"line {number}" for number in range(100, 300)]
    assert {(line.source, line.attempt, line.rank, line.kept) for line in found} == {("bot-w-0-0", 0, 0, lost)}
    # Without the volume, the copy in the store, of which no more is read than that.
    logs.rename(logs.parent / "gone")
    stored = tmp_path / "store" / "bot" / "logs"
    stored.mkdir(parents=True)
    (stored / lost).write_bytes((logs.parent / "gone" / lost).read_bytes())
    monkeypatch.setattr(module, "REPEATED_BYTES", 10 * len(lines[-1]) + 1)
    with kept_logs(spec(tmp_path, checkpoint={"url": f"file://{tmp_path}/store"})):
        again = repeated_lines(spec(tmp_path, checkpoint={"url": f"file://{tmp_path}/store"}))
    assert [line.text for line in again] == [f"line {number}" for number in range(290, 300)]
    assert {(line.source, line.kept) for line in again} == {("bot-w-0-0", lost)}
    # On one machine nothing is repeated.
    assert repeated_lines(here) == []


@pytest.fixture
def prepared(tmp_path):
    """The folder of data with the logs of 12 pods that prepared them, oldest first."""
    data = tmp_path / "data" / "5b1c"
    logs = data.with_name("5b1c.logs")
    logs.mkdir(parents=True)
    for number in range(12):
        content = kept_log.header("other-n0-0", 0) + kept_log.entry(float(number), None, f"prepared {number}")
        (logs / kept_log.file_name(float(number), "other-n0-0", "prepare")).write_bytes(content)
    return data


def test_a_run_copies_the_newest_logs_of_the_preparation_that_it_has_not(tmp_path, prepared, monkeypatch, caplog):
    here = spec(tmp_path, checkpoint={"url": f"file://{tmp_path}/store"})
    copied, logs = [], RunFolder.of(here).logs
    write, store = module._write, module._store
    monkeypatch.setattr(module, "_write", lambda path, content: (copied.append(path.name), write(path, content)))
    monkeypatch.setattr(module, "_store", lambda url, name, content: (copied.append(name), store(url, name, content)))
    copy_preparation_logs(here, prepared)
    newest = sorted(path.name for path in prepared.with_name("5b1c.logs").iterdir())[2:]
    assert sorted(path.name for path in logs.iterdir()) == newest and sorted(copied) == sorted(2 * newest)
    # Another attempt copies what is missing: a file, and the end of one.
    copied.clear()
    (tmp_path / "store" / "bot" / "logs" / newest[3]).unlink()
    (logs / newest[5]).write_bytes(b"{}")
    copy_preparation_logs(here, prepared)
    assert copied == [newest[5], newest[3]] and not caplog.text


def test_a_store_that_is_away_is_asked_once_for_the_logs_of_the_preparation(tmp_path, prepared, monkeypatch, caplog):
    asked = []

    def away(url, name, content):
        asked.append(name)
        raise ConnectionError("no route to s3://me:word@bucket")

    monkeypatch.setattr(module, "_store", away)
    monkeypatch.setattr(module, "_stored_sizes", lambda url: {})
    here = spec(tmp_path, checkpoint={"url": "s3://bucket/runs"})
    copy_preparation_logs(here, prepared)
    (record,) = caplog.records
    assert len(asked) == 1 and len(list(RunFolder.of(here).logs.iterdir())) == module.PREPARATION_LOGS
    assert record.getMessage() == (
        f"the earlier log of the preparation of the data is not copied, and still is in {prepared}.logs: to "
        "s3://bucket/runs/bot/logs: ConnectionError: no route to s3://...@bucket"
    )


def test_a_store_that_hangs_does_not_keep_a_run_from_training(tmp_path, prepared, monkeypatch, caplog):
    answers = threading.Event()
    monkeypatch.setattr(module, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(module, "_stored_sizes", lambda url: answers.wait(60) and {})
    monkeypatch.setattr(module, "_store", lambda url, name, content: None)
    try:
        copy_preparation_logs(spec(tmp_path, checkpoint={"url": "s3://bucket/runs"}), prepared)
        (record,) = caplog.records
        assert "still is in" in record.getMessage() and "copying takes longer than" in record.getMessage()
    finally:
        answers.set()
