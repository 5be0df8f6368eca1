"""`resources.time_limit`: when a run is told and ended, and that it continues with more time."""

import logging

import pytest

from strata_platform.outcomes import TIME_LIMIT
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import seconds_trained
from tasks.runtime.training.time_limit import TimeLimit, TimeLimitReached
from tests.runtime.helpers.train_only import train_spec


class Clock:
    """Each step takes so many seconds."""

    def __init__(self, seconds):
        self.now, self.seconds = 1000.0, seconds

    def __call__(self):
        return self.now


def steps_to_save(limit, seconds, spent=0.0, start=0):
    """The steps after which a checkpoint is due, up to the one that ends the run, and how often rank 0 was asked."""
    clock, asked, due = Clock(seconds), [], []

    class Ranks(Processes):
        def on_main(self, function):
            asked.append(1)
            return function()

    left = TimeLimit(limit, spent, Ranks(), clock)
    left.begin(start)
    for step in range(start + 1, 10**6):
        clock.now += clock.seconds
        if left.after(step):
            due.append(step)
        if left.is_used_up:
            return due, len(asked)
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    ("limit", "seconds", "spent", "due"),
    [
        # Ten minutes before the end, or a tenth of the time.
        (36_000, 1.0, 0.0, [35_400, 36_000]),
        (1_000, 1.0, 0.0, [900, 1_000]),
        (1_000, 1.0, 700.0, [200, 300]),
        # The notice falls into the last step.
        (100, 40.0, 0.0, [3]),
        (100, 1.0, 95.0, [1, 5]),
    ],
)
def test_a_checkpoint_is_due_before_the_end_and_at_it(limit, seconds, spent, due, caplog):
    with caplog.at_level(logging.WARNING):
        found, asked = steps_to_save(limit, seconds, spent)
    assert found == due
    assert len(caplog.records) == len(due) - 1
    # Ranks do not wait for each other after every step.
    assert asked < 40


def test_steps_that_become_slower_do_not_miss_the_end():
    clock = Clock(1.0)
    left = TimeLimit(1_000, 0.0, Processes(), clock)
    left.begin(0)
    ends = None
    for step in range(1, 3_000):
        clock.now += 1.0 if step < 300 else 2.0
        left.after(step)
        if left.is_used_up:
            ends = clock.now - 1000.0
            break
    assert 1_000 <= ends <= 1_002


def test_no_limit_asks_nobody():
    left = TimeLimit(None, 1e9, None)
    left.begin(0)
    assert not left.after(1) and not left.is_used_up
    left.require_left("never")


def test_a_run_out_of_time_is_saved_is_not_retried_and_continues_with_more(tmp_path):
    spec = RunSpec.model_validate(
        {
            "output": str(tmp_path),
            "data": {"sequence_length": 64, "max_samples": 20},
            "training": {"steps": 100_000, "micro_batch_size": 1},
            "checkpoint": {"every": 100_000},
            "runtime": {"framework": "torch"},
            "tracking": {"report_to": [], "log_every": 1},
            "resources": {"time_limit": 1},
            "faults": {"health_check": False},
        }
    )
    folder = RunFolder.of(spec)
    with pytest.raises(
        TimeLimitReached, match=r"resources\.time_limit: 1 s of training are used up after step \d+ of"
    ) as end:
        train_spec(spec)
    assert end.value.outcome is TIME_LIMIT and not TIME_LIMIT.retryable
    done = checkpoint.step_of(checkpoint.latest(folder.checkpoints))
    assert f"after step {done} of 100000, which is saved" in str(end.value)
    assert seconds_trained(folder.metrics) > 0.9 and not folder.record.exists()
    # The agent starts the processes again: they end before they build the model.
    with pytest.raises(TimeLimitReached, match="used up already"):
        train_spec(spec)
    assert len(folder.attempts.read_text().splitlines()) == 1
    more = spec.model_copy(update={"resources": spec.resources.model_copy(update={"time_limit": 2})})
    with pytest.raises(TimeLimitReached, match="2 s of training are used up after"):
        train_spec(more)
    assert checkpoint.step_of(checkpoint.latest(folder.checkpoints)) > done
    assert seconds_trained(folder.metrics) < 10
