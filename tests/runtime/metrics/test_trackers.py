"""Trackers are told what the metrics file holds, under its names, and never hold up or end a run."""

import logging
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strata_platform.runs import EvaluationPoint, MetricPoint
from strata_platform.spec import RunSpec
from tasks.runtime.metrics.trackers import Trackers, require_trackers
from tasks.runtime.metrics.trackers import channel as channel_module
from tasks.runtime.metrics.trackers.channel import Channel
from tasks.runtime.metrics.trackers.mlflow import Mlflow, flat
from tasks.runtime.metrics.trackers.tracker import settings_of, values_of
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.free_port import free_port

POINT = MetricPoint(
    step=1,
    attempt=0,
    time=1.76e9,
    loss=2.5,
    learning_rate=0.125,
    grad_norm=None,
    tokens=10,
    target_tokens=8,
    tokens_per_second=5.0,
    step_seconds=2.0,
    memory_bytes=1 << 20,
    metrics={"accuracy": 0.75},
    data_wait_seconds=0.5,
)
POINTS = [replace(POINT, step=step, loss=3.0 - step / 4) for step in range(1, 5)]
VALUES = [values_of(point) for point in POINTS]


def make_spec(output, *trackers):
    return RunSpec.model_validate(
        {"output": str(output), "tracking": {"report_to": list(trackers), "project": "tests"}}
    )


class Kept:
    """A tracker in memory, which fails as often as it is told to."""

    def __init__(self, failures=0):
        self.failures, self.values, self.complete = failures, [], None

    def log(self, values):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("server down")
        self.values += values

    def close(self, *, complete):
        self.complete = complete


def test_names_are_those_of_the_metrics_file():
    assert values_of(POINT).values == {
        "train/loss": 2.5,
        "train/learning_rate": 0.125,
        "train/tokens": 10,
        "train/target_tokens": 8,
        "train/tokens_per_second": 5.0,
        "train/step_seconds": 2.0,
        "train/memory_bytes": 1 << 20,
        "train/data_wait_seconds": 0.5,
        "train/accuracy": 0.75,
        "train/skipped": 0,
    }


def test_a_tracker_that_comes_back_gets_what_it_missed(caplog):
    kept = Kept(failures=2)
    channel = Channel("here", lambda: kept)
    for values in VALUES:
        channel.log([values])
    channel.close(complete=True)
    assert (kept.values, kept.complete) == (VALUES, True)
    [warning] = caplog.messages
    assert "here failed" in warning and "server down" in warning and "from step 1 on" in warning


def test_what_a_tracker_never_got_is_told_at_the_end(caplog):
    kept = Kept(failures=100)
    channel = Channel("here", lambda: kept)
    channel.log(VALUES[:2])
    channel.log(VALUES[2:])
    channel.close(complete=True)
    assert len(caplog.messages) == 2
    assert caplog.messages[1] == "tracking: here did not get steps 1 to 4; metrics.jsonl has them"


def test_a_tracker_that_cannot_be_opened_is_told_of(caplog):
    def refuse():
        raise PermissionError("no such key")

    channel = Channel("here", refuse)
    channel.close(complete=False)
    assert len(caplog.messages) == 1 and "no such key" in caplog.messages[0]


def test_nobody_waits_for_a_tracker_that_hangs(caplog, monkeypatch):
    monkeypatch.setitem(channel_module.PATIENCE_SECONDS, False, 0.01)
    released = threading.Event()

    class Hanging(Kept):
        def log(self, values):
            released.wait()

    channel = Channel("here", Hanging)
    channel.log(VALUES[:1])
    channel.log(VALUES[1:])
    channel.close(complete=False)
    released.set()
    assert caplog.messages == ["tracking: here did not get steps 1 to 4; metrics.jsonl has them"]


def test_tensorboard_has_every_value_of_every_step(tmp_path):
    spec = make_spec(tmp_path, "tensorboard")
    trackers = Trackers(spec, RunFolder.of(spec), done=0)
    trackers.log(POINTS)
    trackers.close(complete=True)
    events = EventAccumulator(str(RunFolder.of(spec).tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) == set(values_of(POINT).values)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(p.step, p.loss) for p in POINTS]


def test_tensorboard_hides_the_steps_from_which_a_run_went_back(tmp_path):
    """To the checkpoint of step 2, and once more to that of step 3, from the one after it."""
    spec = make_spec(tmp_path, "tensorboard")
    trackers = Trackers(spec, RunFolder.of(spec), done=0)
    again = [replace(POINT, step=step, loss=9.0 + step) for step in (3, 4, 4)]
    trackers.log([*POINTS, *again[:2]])
    trackers.log(again[2:])
    trackers.note({"warmup/planned": 3}, step=4)
    trackers.close(complete=True)
    events = EventAccumulator(str(RunFolder.of(spec).tensorboard)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, POINTS[0].loss), (2, POINTS[1].loss), (3, 12.0), (4, 13.0)]
    assert [event.value for event in events.Scalars("warmup/planned")] == [3]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_that_is_not_there_is_named_before_training(name, tmp_path, monkeypatch):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    # Such a folder is what the tracker's own runs leave behind.
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=rf"report_to has '{name}', which is not installed; pip install 'strata\[{name}\]'"
    ):
        require_trackers(make_spec(tmp_path, name).tracking)


@pytest.mark.parametrize(("name", "variable"), [("mlflow", "MLFLOW_TRACKING_URI"), ("wandb", "WANDB_API_KEY")])
def test_a_tracker_that_does_not_know_whom_to_tell_is_named_before_training(name, variable, tmp_path, monkeypatch):
    # As installed: nothing of it is loaded here.
    package = tmp_path / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ValueError, match=rf"report_to has '{name}': set the environment variable {variable} to"):
        require_trackers(make_spec(tmp_path, name).tracking)
    monkeypatch.setenv(variable, "there")
    require_trackers(make_spec(tmp_path, name).tracking)


def track(spec, *points, done=0):
    """Steps, and an evaluation after the last of them."""
    require_trackers(spec.tracking)
    trackers = Trackers(spec, RunFolder.of(spec), done=done)
    trackers.log(points)
    trackers.log_evaluation(EvaluationPoint(points[-1].step, 0, points[-1].time, 2.5, {"accuracy": 0.5}, 0.1, ()))
    trackers.close(complete=True)


def test_mlflow_continues_its_run(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    spec = make_spec(tmp_path, "mlflow")
    RunFolder.of(spec).root.mkdir()
    track(spec, *POINTS[:2])
    track(spec, *POINTS[2:], done=2)
    assert caplog.messages == []
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.status, run.data.params["training.micro_batch_size"]) == ("FINISHED", "4")
    assert set(run.data.metrics) == {*values_of(POINT).values, "eval/loss", "eval/accuracy", "eval/seconds"}
    evaluated = client.get_metric_history(run.info.run_id, "eval/loss")
    assert [(metric.step, metric.value) for metric in evaluated] == [(2, 2.5), (4, 2.5)]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(point.step, point.loss) for point in POINTS]


class Server:
    """As much of MLflow's client, and of the server behind it, as begins a run; it fails as often as it is told to."""

    runs, failures = {}, 0

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment, run_name):
        self.runs[f"run-{len(self.runs)}"] = {}
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run-{len(self.runs) - 1}"))

    def get_run(self, run):
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.runs[run])))

    def update_run(self, run, status):
        assert run in self.runs

    def log_batch(self, run, params):
        if Server.failures:
            Server.failures -= 1
            raise ConnectionError("server down")
        for name, value in params:
            assert self.runs[run].setdefault(name, value) == value


def test_an_mlflow_server_that_fails_has_one_run_in_the_end(tmp_path, monkeypatch):
    """With all fields; they stay what they were where a later start has others."""
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Server))
    pair = lambda name, value: (name, value)  # noqa: E731
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=None, Param=pair))
    monkeypatch.setattr(Server, "runs", {})
    monkeypatch.setattr(Server, "failures", 2)
    spec = make_spec(tmp_path, "mlflow")
    folder = RunFolder.of(spec)
    folder.create()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            Mlflow(spec, folder, 0)
    Mlflow(spec, folder, 0)
    Mlflow(spec.model_copy(update={"output": "elsewhere"}), folder, 2)
    assert Server.runs == {"run-0": {name: str(value) for name, value in flat(settings_of(spec))}}


def test_an_mlflow_server_that_is_down_is_warned_of(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    spec = make_spec(tmp_path, "mlflow")
    RunFolder.of(spec).root.mkdir()
    track(spec, *POINTS)
    assert "mlflow failed" in caplog.messages[0]
    assert caplog.messages[1:] == ["tracking: mlflow did not get steps 1 to 4; metrics.jsonl has them"]


def test_wandb_continues_its_run(tmp_path, monkeypatch, caplog, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    spec = make_spec(tmp_path, "wandb")
    RunFolder.of(spec).root.mkdir()
    with caplog.at_level(logging.INFO, "tasks"):
        track(spec, *POINTS[:2])
        track(spec, *POINTS[2:], done=2)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    root = RunFolder.of(spec).root
    files = list(root.glob("wandb/offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{(root / 'wandb.id').read_text()}"}
    written = b"".join(file.read_bytes() for file in files)
    assert b"train/loss" in written and b"eval/loss" in written and b"eval/accuracy" in written
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_what_others_see_of_the_spec_has_no_signature():
    spec = RunSpec.model_validate({"data": {"source": ["https://host/rows.jsonl?X-Signature=hidden", "b.jsonl"]}})
    assert settings_of(spec)["data"]["source"] == ["https://host/rows.jsonl?...", "b.jsonl"]
    assert settings_of(RunSpec()) == RunSpec().model_dump(mode="json")
