"""What is measured of a step is on record, once it is flushed."""

import logging
import math
import re
from contextlib import closing

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strata_platform.spec import RunSpec
from tasks.runtime.metrics.recorder import Recorder
from tasks.runtime.objectives import MicroBatchLoss
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points


@pytest.fixture
def recorder(tmp_path):
    spec = RunSpec.model_validate({"output": str(tmp_path), "tracking": {"report_to": []}})
    recorder = Recorder(spec, RunFolder.of(spec), Processes(), attempt=0)
    recorder.begin(0, 10)
    yield recorder
    recorder.close()


def step(recorder, number, loss, norm=1.0):
    recorder.begin_step(torch.tensor(4))
    recorder.add_micro_batch(share(loss), tokens=8)
    recorder.end_step(number, torch.tensor(norm), 0.1, None)


def share(loss, **metrics):
    return MicroBatchLoss(torch.tensor(loss), {name: torch.tensor(value) for name, value in metrics.items()})


def test_the_first_step_is_written_at_once_and_others_when_they_are_gathered(recorder, tmp_path, caplog):
    file = RunFolder.of(RunSpec(output=str(tmp_path))).metrics
    with caplog.at_level(logging.INFO, "tasks"):
        for number in (1, 2, 3):
            step(recorder, number, 2.0 + number)
            assert [point.step for point in read_points(file)] == [1]
    [line] = caplog.messages
    assert re.match(r"step  1/10  loss 3\.0000 .*  in \d+\.\d s$", line)
    recorder.flush()
    assert [(point.step, point.loss, point.tokens, point.target_tokens) for point in read_points(file)] == [
        (1, 3.0, 8, 4),
        (2, 4.0, 16, 8),
        (3, 5.0, 24, 12),
    ]


def test_micro_batches_of_a_step_are_one_loss(recorder, tmp_path):
    recorder.begin_step(torch.tensor(4))
    assert recorder.step_is_open
    recorder.add_micro_batch(share(0.5, accuracy=0.25), tokens=8)
    recorder.add_micro_batch(share(0.25, accuracy=0.5), tokens=8)
    recorder.end_step(1, None, 0.1, None)
    assert not recorder.step_is_open
    recorder.flush()
    [point] = read_points(RunFolder.of(RunSpec(output=str(tmp_path))).metrics)
    assert (point.loss, point.tokens, point.target_tokens, point.metrics) == (0.75, 16, 4, {"accuracy": 0.75})


@pytest.mark.parametrize(
    ("norm", "skip", "expected"), [(1.0, None, 0), (1.0, 0.0, 0), (1.0, 1.0, 1), (math.inf, 0.0, 1), (None, None, 0)]
)
def test_steps_that_were_not_taken_are_marked(recorder, norm, skip, expected):
    recorder.begin_step(torch.tensor(4))
    recorder.add_micro_batch(share(2.0), tokens=8)
    [point] = recorder.end_step(1, norm, 0.1, None if skip is None else torch.tensor(skip))
    assert (point.skipped, point.grad_norm) == (expected, norm)


def test_numbers_of_the_run_are_in_tensorboard(tmp_path):
    spec = RunSpec(output=str(tmp_path))
    with closing(Recorder(spec, RunFolder.of(spec), Processes(), attempt=0)) as recorder:
        recorder.begin(0, 10)
        recorder.note("warmup", {"planned": 17, "seconds": 0.5, "device": "NVIDIA H200", "failed": []})
    events = EventAccumulator(str(RunFolder.of(spec).tensorboard))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == {
        "warmup/planned": 17.0,
        "warmup/seconds": 0.5,
    }
