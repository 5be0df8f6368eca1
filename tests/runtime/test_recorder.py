"""A run whose numbers are lost ends there, before another checkpoint is taken."""

import math
from contextlib import closing

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strata_platform.spec import RunSpec
from tasks.runtime.folder import RunFolder
from tasks.runtime.metrics import read_points
from tasks.runtime.objectives import Share
from tasks.runtime.processes import Processes
from tasks.runtime.recorder import Recorder


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
    recorder.end_step(number, torch.tensor(norm), 0.1)


def share(loss, **metrics):
    return Share(torch.tensor(loss), {name: torch.tensor(value) for name, value in metrics.items()})


def test_steps_are_written_when_they_are_gathered(recorder, tmp_path):
    for number in (1, 2):
        step(recorder, number, 2.0 + number)
    assert read_points(RunFolder.of(RunSpec(output=str(tmp_path))).metrics) == []
    recorder.flush()
    points = read_points(RunFolder.of(RunSpec(output=str(tmp_path))).metrics)
    assert [(point.step, point.loss, point.tokens, point.target_tokens) for point in points] == [
        (1, 3.0, 8, 4),
        (2, 4.0, 16, 8),
    ]


def test_micro_batches_of_a_step_are_one_loss(recorder, tmp_path):
    recorder.begin_step(torch.tensor(4))
    assert recorder.step_is_open
    recorder.add_micro_batch(share(0.5, accuracy=0.25), tokens=8)
    recorder.add_micro_batch(share(0.25, accuracy=0.5), tokens=8)
    recorder.end_step(1, None, 0.1)
    assert not recorder.step_is_open
    recorder.flush()
    [point] = read_points(RunFolder.of(RunSpec(output=str(tmp_path))).metrics)
    assert (point.loss, point.tokens, point.target_tokens, point.metrics) == (0.75, 16, 4, {"accuracy": 0.75})


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)])
def test_numbers_that_are_lost_end_the_run_and_stay_on_record(recorder, tmp_path, loss, norm):
    step(recorder, 1, 2.0)
    step(recorder, 2, loss, norm)
    with pytest.raises(ValueError, match=r"step 2: the loss is .* lower optimizer\.lr"):
        recorder.flush()
    points = read_points(RunFolder.of(RunSpec(output=str(tmp_path))).metrics)
    assert [point.step for point in points] == [1, 2]


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
