"""`python -m tasks.runtime`: exit codes, and errors that come early and say the way out."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from strata_platform.spec import RunSpec, dump_spec
from tasks.runtime.__main__ import main
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.train import total_steps

ROOT = Path(__file__).parents[2]


def start(*arguments, env=None):
    command = [sys.executable, "-X", "importtime", "-m", "tasks.runtime", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600, env=env)


def test_a_wrong_spec_ends_with_code_2_before_torch_is_loaded(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text("training: {steps: 0}\nmodle: x\n")
    ended = start(spec, "--set", "seed=-1")
    assert ended.returncode == 2
    assert "training.steps" in ended.stderr and "seed (--set seed=-1)" in ended.stderr
    assert "modle" in ended.stderr
    loaded = {line.split("|")[-1].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "strata_platform.spec" in loaded
    assert "torch" not in loaded


def test_a_second_start_waits_for_the_end_of_the_export(tmp_path, monkeypatch):
    spec = RunSpec.model_validate(
        {
            "output": str(tmp_path),
            "data": {"max_samples": 20, "sequence_length": 64},
            "training": {"steps": 1, "micro_batch_size": 1},
            "evaluation": {"samples": 0},
            "tracking": {"report_to": []},
        }
    )
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    seen = []

    def export(*arguments):
        with pytest.raises(ValueError, match="is being trained by process"), RunFolder.of(spec).lock(timeout=0):
            pass
        seen.append(arguments)

    monkeypatch.setattr("tasks.runtime.export.export_model.export", export)
    # It would take the loggers from the tests that follow.
    monkeypatch.setattr("tasks.runtime.__main__.configure_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["runtime", str(tmp_path / "spec.yaml")])
    assert main() == 0 and seen


def test_a_run_goes_on_whatever_is_committed_to_its_data_since(tmp_path, monkeypatch):
    rows = {
        sha: datasets.Dataset.from_list([{"text": f"{sha} says {n} times {n}"} for n in range(40)])
        for sha in ("a" * 40, "b" * 40)
    }
    newest, asked = [], []

    def info(hub, name, revision, timeout):
        asked.append(name)
        return SimpleNamespace(sha=newest[-1])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr("datasets.load_dataset", lambda *names, revision, **rest: rows[revision])
    monkeypatch.setattr("tasks.runtime.evaluation.evaluate_model.evaluate", lambda spec, record, data, weights: record)
    seen = []
    monkeypatch.setattr(
        "tasks.runtime.export.export_model.export", lambda *arguments: seen.extend(arguments[2].manifest.commits)
    )
    monkeypatch.setattr("tasks.runtime.__main__.configure_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["runtime", str(tmp_path / "spec.yaml")])

    def run(revision=None):
        spec = {
            "output": str(tmp_path),
            "objective": {"type": "pretrain"},
            "data": {"source": "org/texts", "revision": revision, "sequence_length": 64},
            "training": {"steps": 1, "micro_batch_size": 1},
            "tracking": {"report_to": []},
        }
        (tmp_path / "spec.yaml").write_text(dump_spec(RunSpec.model_validate(spec)))
        return main()

    newest.append("a" * 40)
    assert run() == 0 and asked == ["org/texts"]
    newest.append("b" * 40)
    # As the run began, also without the prepared data, and as the error of another revision advises.
    assert run() == 0
    shutil.rmtree(tmp_path / "data")
    assert run() == 0
    assert run("b" * 40) == 2
    assert run("a" * 40) == 0
    assert seen == ["a" * 40] * 4 and asked == ["org/texts"]


def test_a_shape_that_was_not_started_is_refused_with_the_command():
    spec = RunSpec.model_validate({"topology": {"nproc_per_node": 4}, "parallel": {"type": "ddp"}})
    with pytest.raises(ValueError, match=r"= 4 processes, but 1 were started.*torchrun --nnodes 1 --nproc-per-node 4"):
        Processes().require_world_size(spec.topology)


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    processes = Processes.from_environment()
    assert (processes.rank, processes.local_rank, processes.world_size, processes.is_main) == (5, 1, 8, False)


def test_a_part_of_the_environment_of_torchrun_is_refused(monkeypatch):
    """Operators of Kubernetes set it in pods that start torchrun, but for the places in the pod."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK 0 and no LOCAL_RANK, .* start the run with torchrun, or unset RANK"):
        Processes.from_environment()


@pytest.mark.parametrize(
    ("training", "rows", "steps"),
    [
        ({"steps": 7}, 1000, 7),
        ({"epochs": 1, "micro_batch_size": 4}, 101, 26),
        ({"epochs": 0.5, "micro_batch_size": 4}, 101, 13),
        ({"epochs": 3, "micro_batch_size": 4, "gradient_accumulation_steps": 8}, 101, 10),
        ({"micro_batch_size": 4}, 101, 51),
        # In floating point, 525 * (1 / 75) is a little more than 7, and 0.1 a little more than a tenth.
        ({"epochs": 1, "micro_batch_size": 75}, 525, 7),
        ({"epochs": 0.1, "micro_batch_size": 1}, 1000, 100),
    ],
)
def test_steps_of_a_run(training, rows, steps):
    assert total_steps(RunSpec(training=training), rows) == steps


def test_data_smaller_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"3 rows, fewer than one batch: training\.micro_batch_size 4 x 1 processes"):
        total_steps(RunSpec(training={"steps": 10}), 3)
