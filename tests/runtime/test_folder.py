"""A run's folder belongs to one spec."""

import logging
import os
from contextlib import ExitStack

import pytest

from strata_platform.spec import RunSpec
from tasks.runtime.folder import RunFolder


def spec(tmp_path, **changes):
    return RunSpec.model_validate({"output": str(tmp_path), **changes})


def test_paths_are_absolute_and_below_output_and_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunFolder.of(RunSpec(name="mine", output="here")).record == tmp_path / "here" / "mine" / "record.json"


def test_same_spec_continues(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"tracking": {"log_every": 3}},
        {"checkpoint": {"every": 7}},
        {"evaluation": {"samples": 1}},
        {"resources": {"cpu": "8"}},
        {"kernels": {"warmup": False}},
        {"runtime": {"framework": "torch"}},
        {"topology": {"nproc_per_node": 2}, "parallel": {"type": "ddp"}, "training": {"micro_batch_size": 2}},
        {"training": {"micro_batch_size": 1, "gradient_accumulation_steps": 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_the_next_step_may_differ(tmp_path, change):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, **change))


def test_another_spec_is_refused_with_what_differs(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    with pytest.raises(ValueError, match=r"seed was 0, is 7.*optimizer\.lr was None, is 0\.001") as error:
        RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, seed=7, optimizer={"lr": 1e-3}))
    assert "Choose another name" in str(error.value)


def test_the_rows_of_a_step_may_be_spread_but_not_changed(tmp_path):
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    with pytest.raises(ValueError, match=r"rows per step \(training\.micro_batch_size x .*\) was 4, is 8"):
        RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, training={"gradient_accumulation_steps": 2}))


def test_another_precision_is_another_run(tmp_path):
    two = {"topology": {"nproc_per_node": 2}, "training": {"micro_batch_size": 2}}
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path))
    RunFolder.of(spec(tmp_path)).claim(spec(tmp_path, **two, parallel={"type": "fsdp"}))
    with pytest.raises(ValueError, match=r"parallel\.compute_dtype was 'model', is 'bfloat16'"):
        RunFolder.of(spec(tmp_path)).claim(
            spec(tmp_path, **two, parallel={"type": "fsdp", "compute_dtype": "bfloat16"})
        )


def test_attempts_are_counted(tmp_path):
    folder = RunFolder.of(spec(tmp_path))
    folder.claim(spec(tmp_path))
    assert [folder.begin_attempt() for _ in range(3)] == [0, 1, 2]


def test_a_run_is_trained_by_one_start_at_a_time(tmp_path, caplog):
    folder = RunFolder.of(spec(tmp_path, name="mine"))
    with folder.lock():
        with pytest.raises(ValueError, match=rf"mine is being trained by process {os.getpid()} on .*; wait for it"):
            folder.lock(patience=0.0).__enter__()
        assert "waiting for its end" not in caplog.text
    with folder.lock(patience=0.0):
        pass


def test_a_start_waits_for_the_one_before_to_end(tmp_path, caplog):
    folder = RunFolder.of(spec(tmp_path))
    with ExitStack() as first:
        first.enter_context(folder.lock())
        # The second one warns when it has found the lock taken; then the first one ends.
        handler = logging.Handler()
        handler.emit = lambda record: first.close()
        logging.getLogger("tasks.runtime.folder").addHandler(handler)
        try:
            with caplog.at_level(logging.WARNING, "tasks"), folder.lock(patience=30.0):
                assert "waiting for its end" in caplog.text
        finally:
            logging.getLogger("tasks.runtime.folder").removeHandler(handler)
