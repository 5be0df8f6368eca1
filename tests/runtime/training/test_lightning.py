"""Lightning drives the loop, and does nothing else: no words, no files, no answer to signals."""

import logging
import signal

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.objectives.next_token import NextToken
from tasks.runtime.process.signals import Preempted
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tests.runtime.helpers.train_only import train_spec

STEPS, SAVED = 6, 2


def make_spec(output, name, **changes):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 64, "max_samples": 60},
            # Three micro-batches: a share divided by them, as Lightning would, is not the same number times three.
            "training": {"steps": STEPS, "micro_batch_size": 1, "gradient_accumulation_steps": 3},
            "checkpoint": {"every": SAVED, "keep_last": STEPS},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": "lightning"},
            **changes,
        }
    )


def curve(spec):
    return [(point.step, point.loss, point.grad_norm) for point in read_points(RunFolder.of(spec).metrics)]


@pytest.fixture(scope="module")
def reference(output):
    """The curve of the plain loop."""
    spec = make_spec(output, "reference", runtime={"framework": "torch"})
    assert train_spec(spec).status == "complete"
    return curve(spec)


@pytest.fixture
def at_micro_batch(monkeypatch):
    """Do something in the forward pass of one micro-batch of the run, from 1."""
    share = NextToken.micro_batch_loss

    def patch(number, act):
        calls = iter(range(1, 1000))

        def patched(self, *args):
            found = share(self, *args)
            return act(found) if next(calls) == number else found

        monkeypatch.setattr(NextToken, "micro_batch_loss", patched)

    return patch


def test_it_trains_quietly_and_leaves_nothing_but_the_run(output, reference, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    spec = make_spec(output, "quiet")
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference
    assert list(tmp_path.iterdir()) == []
    names = {path.name for path in RunFolder.of(spec).root.iterdir()}
    assert names == {path.name for path in (output / "reference").iterdir()}
    said = capfd.readouterr()
    assert "is already prepared" in said.out and len(said.out.splitlines()) == 1
    assert said.err == ""


@pytest.mark.parametrize("answer", ["stop", "save"])
def test_sigterm_is_answered_as_the_spec_says(output, reference, at_micro_batch, answer, caplog):
    spec = make_spec(output, f"sigterm-{answer}", checkpoint={"every": 100, "on_sigterm": answer})

    def told_to_stop(share):
        signal.raise_signal(signal.SIGTERM)
        return share

    # In the middle of step 4.
    before = signal.getsignal(signal.SIGTERM)
    at_micro_batch(11, told_to_stop)
    with caplog.at_level(logging.INFO, "tasks"), pytest.raises(Preempted):
        train_spec(spec)
    assert signal.getsignal(signal.SIGTERM) is before
    saved = checkpoint.latest(RunFolder.of(spec).checkpoints)
    assert (saved and checkpoint.step_of(saved)) == (None if answer == "stop" else 4)
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference


def test_an_interrupt_stays_one_and_so_does_the_next(output, at_micro_batch):
    at_micro_batch(5, lambda share: signal.raise_signal(signal.SIGINT))
    # Python's own handler, whatever a library has put in its place.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train_spec(make_spec(output, "interrupted"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_loss_that_is_not_finite_ends_the_run(output, at_micro_batch):
    spec = make_spec(output, "lost", faults={"nonfinite": "stop"})
    at_micro_batch(8, lambda share: type(share)(share.loss * torch.nan, share.metrics))
    with pytest.raises(ValueError, match=r"step 3: the loss is nan .* lower optimizer\.lr"):
        train_spec(spec)
    assert checkpoint.step_of(checkpoint.latest(RunFolder.of(spec).checkpoints)) == 2


def test_what_is_taken_from_lightning_is_still_there():
    """Were it called otherwise, its handler would come back, and its message before every micro-batch."""
    assert callable(_SignalConnector.register_signal_handlers)
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)
