"""Evaluation during training: it measures what others measure, changes nothing, and decides when a run is over."""

import json
import logging
import signal
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import load_model
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.models.build import build_saved_model, materialize
from tasks.runtime.process.signals import Preempted
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.job import Job
from tests.runtime.helpers.comparable_runs import curve
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")
STEPS = 6


def make_spec(output, name, evaluation=None, framework="torch", **changes):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            # Rows that do not fill their last batch.
            "data": {"sequence_length": 64, "max_samples": 60, "validation_fraction": 0.2},
            "training": {"steps": STEPS, "micro_batch_size": 2},
            "checkpoint": {"every": 2, "keep_last": STEPS},
            "tracking": {"log_every": 4, "report_to": ["tensorboard"]},
            "runtime": {"framework": framework},
            "evaluation": evaluation or {},
            **changes,
        }
    )


def evaluations(spec):
    return [(point.step, point.loss) for point in read_evaluations(RunFolder.of(spec).metrics)]


@pytest.fixture(scope="module")
def plain(output):
    """The curve of a run without evaluation."""
    spec = make_spec(output, "plain")
    train_spec(spec)
    return curve(spec)


@pytest.fixture(scope="module")
def evaluated(output):
    """A run that is evaluated, and its record."""
    spec = make_spec(output, "evaluated", {"every": 3, "during": ["samples"], "samples": 2, "max_new_tokens": 4})
    return spec, train_spec(spec)


@pytest.mark.parametrize("framework", ["hf", "lightning"])
def test_training_is_the_same_with_evaluation(framework, output, plain, evaluated):
    spec = make_spec(output, f"evaluated-{framework}", {"every": 3, "during": ["samples"]}, framework)
    assert train_spec(spec).status == "complete"
    assert curve(spec) == curve(evaluated[0]) == plain
    assert evaluations(spec) == evaluations(evaluated[0])


def test_the_loss_is_the_mean_over_tokens_that_transformers_computes(evaluated):
    """Of the model in the checkpoint, row by row, without kernels, packing or the code of the run, in fp64."""
    spec, record = evaluated
    folder = RunFolder.of(spec)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    rows = prepare(recipe, data_folder(spec.output, recipe), report=print).validation
    assert len(rows) % spec.training.micro_batch_size, "the last batch is full"
    saved = build_saved_model(folder.checkpoints / f"checkpoint-{STEPS}")
    materialize(saved, torch.device("cpu"))
    load_model(Index(folder.checkpoints / f"checkpoint-{STEPS}"), saved)
    model = AutoModelForCausalLM.from_config(saved.config, attn_implementation="eager")
    model.load_state_dict(saved.state_dict())
    model.double().eval()
    total = tokens = 0
    for row in (rows[index] for index in range(len(rows))):
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), row["input_ids"].numel()]
        for begin, end in pairwise(starts):
            ids, labels = row["input_ids"][begin:end], row["labels"][begin:end]
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            total += float(cross_entropy(logits, labels[1:], reduction="sum"))
            tokens += int((labels[1:] != -100).sum())
    assert evaluations(spec)[-1] == (STEPS, pytest.approx(total / tokens, rel=1e-6))
    assert [(e.step, e.loss) for e in record.evaluations] == evaluations(spec)
    assert record.best_step == min(evaluations(spec), key=lambda evaluation: evaluation[1])[0]


def test_a_run_without_a_whole_part_of_an_epoch_is_warned(output, caplog):
    changes = {"training": {"steps": 2, "micro_batch_size": 1}, "checkpoint": {"per_epoch": 1}}
    train_spec(make_spec(output, "short", {"per_epoch": 1}, "torch", **changes))
    told = [text for text in caplog.messages if "for the first time" in text]
    assert [text.split(":")[0] for text in told] == ["checkpoint.per_epoch", "evaluation.per_epoch"]
    assert "and the run has 2; set checkpoint.every for checkpoints before its end" in told[0]


def test_every_evaluation_writes_samples_and_its_time(evaluated):
    spec, record = evaluated
    assert [len(evaluation.samples) for evaluation in record.evaluations] == [2, 2]
    assert all(point.seconds > 0 for point in read_evaluations(RunFolder.of(spec).metrics))
    lines = [json.loads(line) for line in RunFolder.of(spec).metrics.read_text().splitlines()]
    assert sum("eval_loss" in line for line in lines) == 2


def ends_of(parts, rows, per_step, count):
    """The steps that complete the parts of epochs, of which each has `count`."""
    return sorted({-(-part * rows // (count * per_step)) for part in range(1, parts + 1)})


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_epochs_end_with_an_evaluation_and_a_checkpoint(framework, output, caplog):
    """Also after a resume that splits the rows of a step otherwise."""
    caplog.set_level(logging.INFO)
    batch = {"epochs": 2, "micro_batch_size": 3, "gradient_accumulation_steps": 2}
    changes = {"training": batch, "checkpoint": {"per_epoch": 1, "keep_last": 100}}
    spec = make_spec(output, f"epochs-{framework}", {"per_epoch": 2}, framework, **changes)
    record = train_spec(spec)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    rows = prepare(recipe, data_folder(spec.output, recipe), report=print).rows
    assert rows % 6, "epochs end within steps"
    evaluated, saved = ends_of(4, rows, 6, 2), ends_of(2, rows, 6, 1)
    assert record.steps == evaluated[-1] == saved[-1] and set(saved) < set(evaluated)

    def done():
        folders = checkpoint.folders(RunFolder.of(spec).checkpoints)
        return [step for step, _ in evaluations(spec)], [checkpoint.step_of(path) for path in folders]

    assert done() == (evaluated, saved)
    assert f"per epoch of {rows / 6:g} steps: checkpoints 1, evaluations 2" in caplog.text
    changes["training"] = {**batch, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    again = make_spec(output, spec.name, {"per_epoch": 2}, framework, **changes)
    assert train_spec(again, saved[0]).restarts == 1
    assert done() == (evaluated, saved)


@pytest.mark.parametrize("rows", [240, 250])
def test_epochs_end_where_those_of_transformers_do(rows, tmp_path):
    """axolotl gives the Trainer `1 / (evals_per_epoch * num_epochs)` for `eval_steps`. The Trainer rounds the interval
    up, so that it drifts away from the ends of epochs where it is not whole; the evaluations here do not.
    """
    epochs, count, per_step = 3, 4, 4
    spec = RunSpec.model_validate({"training": {"micro_batch_size": per_step}, "evaluation": {"per_epoch": count}})
    steps = -(-rows // per_step) * epochs
    arguments = TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=1 / (count * epochs)
    )
    state, theirs, ours = TrainerState(max_steps=steps), [], []
    state.compute_steps(arguments, steps)
    for step in range(1, steps + 1):
        state.global_step = step
        if DefaultFlowCallback().on_step_end(arguments, state, TrainerControl()).should_evaluate:
            theirs.append(step)
        if spec.is_evaluated(step, rows):
            ours.append(step)
    whole = rows % (per_step * count) == 0
    assert (ours == theirs) == whole
    ends = {-(-epoch * rows // per_step) for epoch in range(1, epochs + 1)}
    assert ends <= {*ours} and (ends <= {*theirs}) == whole


# A threshold that no step comes near: the second evaluation is no progress, and neither is the third.
EARLY = {"every": 1, "early_stopping_patience": 2, "early_stopping_threshold": 100.0}


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_a_run_that_stops_early_is_complete(framework, output, plain, caplog):
    spec = make_spec(output, f"early-{framework}", EARLY, framework)
    with caplog.at_level(logging.INFO, "tasks"):
        record = train_spec(spec)
        assert (record.status, record.steps, record.steps_asked, record.stopped_early) == ("complete", 3, STEPS, True)
        assert curve(spec) == plain[:3]
        assert "stopped early at step 3 of 6" in caplog.text
        assert train_spec(spec) == CompletionRecord.load(RunFolder.of(spec).record) == record
    assert "the run has stopped early already, at step 3 of 6" in caplog.text
    # Without its record, as after a kill between the checkpoint and the record.
    RunFolder.of(spec).record.unlink()
    again = train_spec(spec)
    assert again.model_copy(update={"restarts": 0}) == record and curve(spec) == plain[:3]


def test_more_patience_continues_it(output, plain):
    spec = make_spec(output, "patient", EARLY)
    assert train_spec(spec).stopped_early
    patient = make_spec(output, "patient", {**EARLY, "early_stopping_patience": 100})
    record = train_spec(patient)
    assert (record.status, record.steps, record.stopped_early) == ("complete", STEPS, False)
    assert curve(patient) == plain


class Killed(BaseException):
    """Ends the process, as far as the run can tell."""


def test_a_run_killed_around_an_evaluation_decides_the_same(output, plain, monkeypatch):
    """In the evaluation of step 2, and between the evaluation of step 4 and the checkpoint."""
    settings = {"every": 2, "early_stopping_patience": 2, "early_stopping_threshold": 100.0}
    undisturbed = make_spec(output, "undisturbed", settings)
    expected = train_spec(undisturbed)
    assert (expected.steps, expected.stopped_early) == (6, False)
    killed = make_spec(output, "killed", settings)
    measure, evaluate = Job._evaluate, Job._evaluate

    def die_before(job, step):
        if step == 2:
            raise Killed
        return measure(job, step)

    def die_after(job, step):
        best = evaluate(job, step)
        if step == 4:
            raise Killed
        return best

    for die in (die_before, die_after):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(Job, "_evaluate", die)
            train_spec(killed)
    record = train_spec(killed)
    assert record.restarts == 2 and curve(killed) == plain
    assert record.evaluations == expected.evaluations and record.best_step == expected.best_step


def test_sigterm_during_an_evaluation_saves_first_and_evaluates_later(output, plain, monkeypatch):
    spec = make_spec(
        output, "told-to-stop", {"every": 3}, checkpoint={"every": 100, "on_sigterm": "save", "keep_best": True}
    )
    expect = Job._expect_evaluation

    def stop(job, step):
        signal.raise_signal(signal.SIGTERM)
        return expect(job, step)

    with monkeypatch.context() as patched, pytest.raises(Preempted):
        patched.setattr(Job, "_expect_evaluation", stop)
        train_spec(spec)
    latest = checkpoint.latest(RunFolder.of(spec).checkpoints)
    assert checkpoint.step_of(latest) == 3 and evaluations(spec) == []
    record = train_spec(spec)
    assert record.status == "complete" and curve(spec) == plain
    assert [evaluation.step for evaluation in record.evaluations] == [3, STEPS]


def test_the_best_checkpoint_stays_and_is_exported(output, monkeypatch):
    """The losses are made up, lowest at a step between two checkpoints."""
    losses = {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5, 5: 2.5, 6: 2.0}
    add = Job._evaluate

    def fake(job, step):
        plain = job.early_stopping.add
        monkeypatch.setattr(job.early_stopping, "add", lambda step, loss: plain(step, losses[step]))
        try:
            return add(job, step)
        finally:
            monkeypatch.setattr(job.early_stopping, "add", plain)

    monkeypatch.setattr(Job, "_evaluate", fake)
    keep = {"every": 2, "keep_last": 1, "keep_best": True, "load_best_model_at_end": True}
    spec = make_spec(output, "best", {"every": 1}, checkpoint=keep)
    record = train_spec(spec)
    folder = RunFolder.of(spec).checkpoints
    assert [checkpoint.step_of(path) for path in checkpoint.folders(folder)] == [3, STEPS]
    assert record.best_step == 3 and record.checkpoint == str(folder / "checkpoint-3")
    # A finished run may change its mind.
    last = make_spec(output, "best", {"every": 1}, checkpoint={**keep, "load_best_model_at_end": False})
    assert train_spec(last).checkpoint == str(folder / f"checkpoint-{STEPS}")
    weights = folder / "checkpoint-3" / "process-00000-000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"load_best_model_at_end: the best checkpoint.*checkpoint-3.*to false"):
        train_spec(spec)
