"""Killed at any step and started again, a run computes what it would have computed undisturbed, bit for bit."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train
from tests.helpers import fork_server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("narrowed")
STEPS = 10

# More than two epochs, checkpoints that do not fall on their borders, and two micro-batches to a step.
SMALL = {
    "data": {"sequence_length": 64, "max_samples": 140},
    "training": {"steps": STEPS, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpoint": {"every": 3},
    "tracking": {"log_every": 1},
}


def make_spec(output, name, processes, **changes):
    spec = RunSpec.model_validate(
        {
            **SMALL,
            "name": name,
            "output": str(output),
            "topology": {"nproc_per_node": processes},
            **({"parallel": {"type": "fsdp"}, "runtime": {"framework": "torch"}} if processes > 1 else {}),
            **changes,
        }
    )
    file = output / f"{name}.json"
    file.write_text(spec.model_dump_json())
    return spec, file


def start(file, processes, agent=False):
    """One process, or several; under an elastic agent, if that is asked for."""
    command = ["-m", "tests.runtime.helpers.train_only"]
    if agent:
        command = ["-m", "tests.runtime.helpers.elastic_forked", str(processes), "0", command[1]]
    elif processes > 1:
        command = ["-m", "tests.runtime.helpers.train_forked", str(processes)]
    return fork_server.Popen(
        [sys.executable, *command, "--narrow", str(file)],
        cwd=ROOT,
        env=fork_server.clean_environment(OMP_NUM_THREADS="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def losses(spec):
    points = read_points(RunFolder.of(spec).metrics)
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    return [(point.loss, point.grad_norm, point.learning_rate, point.tokens, point.target_tokens) for point in points]


def wait_for_step(process, step):
    """Read the run's output until it reports `step`."""
    for line in process.stdout:
        if f"step {step:>2}/{STEPS}" in line:
            return
    pytest.fail(f"the run ended before step {step}")


@pytest.fixture(scope="module")
def curve_of(output):
    """What so many processes compute when nothing disturbs them: the Trainer alone, or the plain loop under FSDP."""

    @cache
    def run(processes, precision=None):
        kind = f"-{precision.replace('_', '-')}" if precision else ""
        spec, file = make_spec(output, f"undisturbed-{processes}{kind}", processes, **weights_in(precision))
        finish(start(file, processes))
        return losses(spec)

    return run


def weights_in(precision):
    """Of a spec: bfloat16 weights that are stepped with this `optimizer.precision`; None: fp32 weights."""
    name = precision and precision.replace("-", "_")
    return {"model": {"dtype": "bfloat16"}, "optimizer": {"precision": name}} if name else {}


@pytest.mark.parametrize(("processes", "precision"), [(1, "fp32-master"), (2, "stochastic-rounding")])
def test_bfloat16_weights_come_back_with_their_low_bits_and_random_numbers(processes, precision, output, curve_of):
    spec, file = make_spec(output, f"killed-{precision}", processes, **weights_in(precision))
    first = start(file, processes)
    wait_for_step(first, 7)
    kill_tree(first.pid, signal.SIGKILL)
    first.communicate(timeout=600)
    assert "continuing after step" in finish(start(file, processes))
    assert losses(spec) == curve_of(processes, precision)


@pytest.fixture
def undisturbed(request, curve_of):
    return request.param, curve_of(request.param)


@pytest.mark.parametrize(
    ("undisturbed", "number"),
    [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGTERM)],
    indirect=["undisturbed"],
    ids=["one process, SIGKILL", "two processes, SIGKILL", "two processes, SIGTERM"],
)
def test_killed_at_a_random_step_and_started_again(undisturbed, output, number):
    processes, expected = undisturbed
    # The checkpoint of step 3 is whole by then, however slow the disk: the save after step 6 has waited for it.
    step = random.Random(f"{processes} {number.name}").randint(7, STEPS - 2)
    spec, file = make_spec(output, f"killed-{processes}-{number.name.lower()}", processes)
    first = start(file, processes)
    wait_for_step(first, step)
    # All processes of the job, as when a machine is lost.
    kill_tree(first.pid, number)
    first.communicate(timeout=600)
    assert first.returncode != 0
    assert not RunFolder.of(spec).record.exists()

    said = finish(start(file, processes))
    assert "continuing after step" in said
    record = CompletionRecord.load(RunFolder.of(spec).record)
    assert (record.status, record.steps, record.restarts) == ("complete", STEPS, 1)
    assert losses(spec) == expected


@pytest.mark.parametrize("undisturbed", [2], indirect=True, ids=["two processes"])
def test_told_to_stop_it_may_save_first(undisturbed, output):
    processes, expected = undisturbed
    spec, file = make_spec(
        output,
        "saved-first",
        processes,
        checkpoint={"every": 100, "on_sigterm": "save"},
        # It has an answer to SIGTERM of its own, which must not be given.
        runtime={"framework": "lightning"},
    )
    first = start(file, processes, agent=True)
    wait_for_step(first, 4)
    # As the kubelet does: to the agent alone, which tells its workers.
    first.terminate()
    said, _ = first.communicate(timeout=600)
    assert first.returncode != 0
    saved = checkpoint.step_of(checkpoint.latest(RunFolder.of(spec).checkpoints))
    assert 4 <= saved < STEPS
    assert f"received SIGTERM: step {saved} is done and saved" in said

    assert f"continuing after step {saved}" in finish(start(file, processes))
    assert losses(spec) == expected


def kill_tree(pid, number):
    """Signal the launcher's workers, then the launcher."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in [*map(int, children), pid]:
        os.kill(child, number)


@pytest.fixture
def finished(output):
    """The undisturbed run of one process, and this process in its place."""
    spec, _ = make_spec(output, "undisturbed-1", 1)
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return spec, prepare(recipe, data_folder(spec.output, recipe), report=print)


# These run in this process, in the folder of the run above.
@pytest.mark.parametrize("undisturbed", [1], indirect=True, ids=["one process"])
class TestFinishedRun:
    def test_is_not_trained_again(self, undisturbed, finished, caplog):
        spec, data = finished
        before = CompletionRecord.load(RunFolder.of(spec).record)
        with caplog.at_level(logging.INFO, "tasks"), session(spec) as run:
            assert train(run, data) == before
        assert f"all {STEPS} steps are done already" in caplog.text

    def test_that_has_moved_hands_on_its_own_weights(self, undisturbed, finished, tmp_path):
        spec, data = finished
        shutil.copytree(RunFolder.of(spec).root, tmp_path / spec.name)
        moved = RunSpec.model_validate({**spec.model_dump(), "output": str(tmp_path)})
        with session(moved) as run:
            assert train(run, data).checkpoint == str(checkpoint.latest(RunFolder.of(moved).checkpoints))

    def test_whose_checkpoints_are_gone_is_not_begun_anew_behind_ones_back(
        self, undisturbed, finished, tmp_path, caplog
    ):
        spec, data = finished
        shutil.copytree(RunFolder.of(spec).root, tmp_path / spec.name)
        moved = RunSpec.model_validate({**spec.model_dump(), "output": str(tmp_path)})
        folder = RunFolder.of(moved)
        shutil.rmtree(folder.checkpoints)
        with pytest.raises(ValueError, match=rf"record\.json says .* {STEPS} steps.*restore"), session(moved) as run:
            train(run, data)
        folder.record.unlink()
        with caplog.at_level(logging.WARNING, "tasks"), session(moved) as run:
            assert train(run, data).status == "complete"
        assert f"{folder.root} has recorded steps but no complete checkpoint: the run starts again" in caplog.text
        assert losses(moved) == undisturbed[1]

    def test_whose_record_is_lost_gets_it_back_without_training(self, undisturbed, finished):
        spec, data = finished
        before = CompletionRecord.load(RunFolder.of(spec).record)
        RunFolder.of(spec).record.unlink()
        with session(spec) as run:
            again = train(run, data)
        # Another start, in a process with other threads: all that it computed is the same.
        assert again.model_copy(update={"restarts": before.restarts, "device": before.device}) == before

    def test_whose_record_says_incomplete_is_looked_at_again(self, undisturbed, finished):
        spec, data = finished
        record = CompletionRecord.load(RunFolder.of(spec).record)
        record.model_copy(update={"status": "incomplete"}).save(RunFolder.of(spec).record)
        with session(spec) as run:
            assert train(run, data).status == "complete"

    def test_is_not_continued_on_other_data(self, undisturbed, finished, monkeypatch):
        spec, data = finished
        # Of the same recipe: what the rows came to be is what counts.
        shards = tuple(replace(shard, sha256="other") for shard in data.manifest.train.shards)
        train_split = replace(data.manifest.train, shards=shards)
        monkeypatch.setattr(data, "manifest", replace(data.manifest, train=train_split))
        with (
            pytest.raises(ValueError, match=r"trained on other rows than data\.source 'python-docs'"),
            session(spec) as run,
        ):
            train(run, data)

    def test_is_continued_on_the_same_rows_of_another_recipe(self, undisturbed, finished, monkeypatch):
        spec, data = finished
        monkeypatch.setattr(data, "manifest", replace(data.manifest, recipe_hash="other"))
        with session(spec) as run:
            assert train(run, data).status == "complete"

    def test_resume_never_refuses_its_checkpoints(self, undisturbed, finished):
        spec, data = finished
        never = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume": "never"})})
        with (
            pytest.raises(ValueError, match=r"checkpoint\.resume is 'never' but .* has checkpoints"),
            session(never) as run,
        ):
            train(run, data)

    def test_with_a_damaged_last_checkpoint_continues_from_the_one_before(self, undisturbed, finished, caplog):
        spec, data = finished
        folder = RunFolder.of(spec)
        newest = checkpoint.latest(folder.checkpoints)
        weights = newest / "process-00000-000.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with caplog.at_level(logging.INFO, "tasks"), session(spec) as run:
            assert train(run, data).status == "complete"
        assert f"{newest} is not used: process-00000-000.safetensors has" in caplog.text
        assert "continuing after step 9" in caplog.text
        assert losses(spec) == undisturbed[1]
