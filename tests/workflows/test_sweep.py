"""Many runs side by side, on one machine: what `pyflyte run workflows/sweep.py sweep` leaves."""

import csv
import signal

import pytest
import yaml
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.error import FlyteError

from strata_platform.spec import RunSpec, load_spec
from strata_platform.spec.grid import Grid
from tasks import sweep
from tasks.runtime.process.signals import Preempted
from tasks.runtime.report.comparison import Trial, render_comparison
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.sweep import compare, outcome
from tests.workflows.helpers.forked_flyte import pyflyte


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Of two runs one has no model."""
    folder = tmp_path_factory.mktemp("sweep")
    spec = {
        "name": "sweep",
        "output": str(folder / "out"),
        "data": {"sequence_length": 64, "max_samples": 60},
        "training": {"steps": 2, "micro_batch_size": 1},
        "evaluation": {"samples": 0, "max_batches": 1},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    (folder / "grid.yaml").write_text("fields: {model.name: [./nowhere, tiny-llama]}")
    files = ["--spec", str(folder / "spec.yaml"), "--grid", str(folder / "grid.yaml")]
    ended = pyflyte("run", "workflows/sweep.py", "sweep", *files)
    return folder / "out" / "sweep", ended


def record(name, loss):
    return CompletionRecord(
        status="complete", name=name, spec_hash="", steps=1, steps_asked=1, tokens=1, target_tokens=1, train_loss=1.0,
        eval_loss_after=loss, checkpoint="", restarts=0, seconds=1.0, tokens_per_second=1.0, peak_memory_bytes=0,
        parameters=1, trainable_parameters=1, device="", world_size=1, data={}, kernels={}, warmup={}, versions={},
    )  # fmt: skip


def test_on_a_cluster_a_failed_run_is_named_and_the_others_are_in_the_table(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sweep, "is_local", lambda: False)
    monkeypatch.setattr(sweep, "configure_logging", lambda: None)
    spec = RunSpec(name="s", output=str(tmp_path))
    grid = Grid(fields={"optimizer.lr": [1e-4, 2e-4], "seed": [1, 2]})
    for number, run in enumerate(grid.runs(spec)):
        if number != 2:
            (tmp_path / run.name).mkdir()
            record(run.name, 2.0 - number).save(tmp_path / run.name / "record.json")
    sweep.name_failures(spec=spec, grid=grid, err=FlyteError(message="a child failed", failed_node_id="n1"))
    failed = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]
    assert failed == ["run s-003 of the sweep did not finish: optimizer.lr 0.0002, seed 1"]
    rows = list(csv.DictReader((tmp_path / "s" / "sweep.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["s-004", "s-002", "s-001", "s-003"]
    assert rows[3]["optimizer.lr"] == "0.0002" and rows[0]["seed"] == "2"


def test_runs_are_ordered_by_their_loss_and_the_lost_come_last(tmp_path):
    spec, grid = RunSpec(name="s", output=str(tmp_path)), Grid(fields={"optimizer.lr": [1e-4, 2e-4, 3e-4, 4e-4]})
    runs = grid.runs(spec)
    losses = {"s-001": 2.0, "s-002": 1.5, "s-004": 1.8}
    records = [record(run.name, losses[run.name]) if run.name in losses else None for run in runs]
    found = compare(spec=spec, grid=grid, runs=runs, records=records)
    assert found.best == runs[1] == load_spec(tmp_path / "s" / "best.yaml")
    rows = list(csv.reader((tmp_path / "s" / "sweep.csv").read_text().splitlines()))
    assert rows[0][:3] == ["run", "optimizer.lr", "validation loss"]
    assert [row[0] for row in rows[1:]] == ["s-002", "s-004", "s-001", "s-003"]
    assert rows[4][2:] == ["", "", "", ""]


def test_a_sweep_of_which_no_run_finished_fails_and_leaves_its_table(tmp_path):
    spec, grid = RunSpec(name="s", output=str(tmp_path)), Grid(fields={"optimizer.lr": [1e-4, 2e-4]})
    with pytest.raises(ValueError, match="no run of the sweep finished") as refused:
        compare.task_function(spec=spec, grid=grid, runs=grid.runs(spec), records=[None, None])
    assert str(tmp_path / "s" / "sweep.csv") in str(refused.value)
    assert len((tmp_path / "s" / "sweep.csv").read_text().splitlines()) == 3
    assert not (tmp_path / "s" / "best.yaml").exists()


def test_in_a_cluster_what_starting_a_run_raises_is_raised(monkeypatch):
    def broken():
        raise ValueError("does not compile")

    monkeypatch.setattr("tasks.sweep.is_local", lambda: True)
    assert outcome(broken) is None
    monkeypatch.setattr("tasks.sweep.is_local", lambda: False)
    with pytest.raises(ValueError, match="does not compile"):
        outcome(broken)


def test_the_page_has_every_run_and_a_dot_for_those_that_finished():
    trials = [
        Trial("a", (1e-4, "<b>"), record("a", 1.5)),
        Trial("b", (1e-3, "<c>"), record("b", 2.5)),
        Trial("c", (1e-2, "<c>"), None),
    ]
    page = render_comparison("name", ("optimizer.lr", "objective.type"), trials)
    assert "2 of 3 runs finished" in page and "did not finish" in page
    assert page.count("<circle") == 4 and "<b>" not in page


def test_a_signal_to_a_run_ends_the_sweep(monkeypatch):
    monkeypatch.setattr("tasks.sweep.is_local", lambda: True)

    def stopped():
        try:
            raise FlyteRecoverableException("stopped before the last step") from Preempted("SIGTERM")
        except FlyteRecoverableException as error:
            raise ValueError("as flytekit says it") from error

    with pytest.raises(SystemExit) as ended:
        outcome(stopped)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_sweep_leaves_a_table_and_the_best_spec(swept):
    folder, ended = swept
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["sweep-002", "sweep-001"]
    assert float(rows[0]["validation loss"]) > 0 and rows[1]["validation loss"] == ""
    assert "a run of the sweep did not finish" in ended.stdout and "./nowhere" in ended.stdout
    assert load_spec(folder / "best.yaml").name == "sweep-002"
    assert (folder.parent / "sweep-002" / "record.json").exists()
