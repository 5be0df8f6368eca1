"""The first task of a run starts what is left of it: neither data that are stored, nor a run that has finished."""

import json

import fsspec
import pytest
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from strata_platform.spec import RunSpec
from tasks import finish, prepare
from tasks.runtime.run_folder.folder import RunFolder
from tasks.steps.finish_step import stored_outputs
from tests.workflows.test_serialization import compiled_by
from workflows.finetune import start


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A run on a cluster, whose object store is in memory."""
    for module in (prepare, finish):
        # It would take the loggers from the tests that follow.
        monkeypatch.setattr(module, "configure_logging", lambda: None)
    monkeypatch.delenv("STRATA_QUEUES", raising=False)
    rows = [{"text": f"def name_{number}(value): return value * {number}"} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    access = FileAccessProvider(str(tmp_path / "sandbox"), f"memory://{tmp_path.name}")
    with FlyteContextManager.with_context(context.with_execution_state(state).with_file_access(access)):
        yield RunSpec.model_validate({
            "output": str(tmp_path / "out"), "data": {"source": str(tmp_path / "rows.jsonl"), "sequence_length": 32},
            "objective": {"type": "pretrain"}, "topology": {"nnodes": 2}, "parallel": {"type": "ddp"},
        })  # fmt: skip


def started(spec):
    """The nodes that the first task starts, by the task they run, and what it returns without any."""
    made = compiled_by(start, spec=spec)
    return {node.task_node.reference_id.name: node for node in getattr(made, "nodes", ())}, made


STORE = fsspec.filesystem("memory")
TRAINING = {"tasks.topology.train_2x1", "tasks.finish.finish"}
PREPARE = "tasks.prepare.prepare"


def test_data_are_prepared_once_for_all_runs_that_read_them(spec):
    assert set(started(spec)[0]) == {PREPARE, *TRAINING}
    planned = prepare.plan(spec)
    stored = prepare.prepare.task_function(planned.recipe, planned.output, planned.url).data.remote_source
    other = spec.model_copy(update={"name": "other", "optimizer": spec.optimizer.model_copy(update={"lr": 1e-5})})
    nodes, _ = started(other)
    assert set(nodes) == TRAINING
    inputs = {item.var: item.binding for item in nodes["tasks.topology.train_2x1"].inputs}
    assert inputs["data"].scalar.blob.uri == stored
    # Other data, and data that the store has no longer.
    assert PREPARE in started(spec.model_copy(update={"data": spec.data.model_copy(update={"sequence_length": 64})}))[0]
    STORE.rm(stored, recursive=True)
    assert set(started(other)[0]) == {PREPARE, *TRAINING}


def test_pods_that_prepare_large_data_are_started_by_a_task_that_knows_their_number(spec):
    large = spec.data.model_copy(update={"prepared_url": "s3://bucket/rows"})
    assert set(started(spec.model_copy(update={"data": large}))[0]) == {PREPARE, "workflows.finetune.train_on_parts"}


def test_a_run_that_has_finished_starts_nothing_and_has_the_same_outputs(spec, tmp_path):
    folder = RunFolder.of(spec)
    folder.create()
    outputs = {name: f"memory://{tmp_path.name}/outputs/{name}" for name in ("model", "report", "record")}
    for name, file in (("model", "config.json"), ("report", ""), ("record", "")):
        STORE.pipe(f"{outputs[name]}/{file}".rstrip("/"), b"{}")
    hashes = {"spec_hash": spec.hash(), "recipe_hash": prepare.plan(spec).recipe.hash()}
    folder.stored_outputs.write_text(json.dumps({**hashes, **outputs}))
    nodes, made = started(spec)
    assert not nodes
    assert {name: literal.scalar.blob.uri for name, literal in made.literals.items()} == outputs
    # More samples are another report, and what is gone is made anew.
    more = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"samples": 9})})
    assert set(started(more)[0]) == {PREPARE, *TRAINING}
    # So are those of other rows in the same file.
    rows = tmp_path / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("value * 7", "value * 8"))
    assert set(started(spec)[0]) == {PREPARE, *TRAINING}
    rows.write_text(before)
    assert not started(spec)[0]
    STORE.rm(outputs["report"])
    assert set(started(spec)[0]) == {PREPARE, *TRAINING}


@pytest.mark.parametrize("text", ['{"spec_hash": "a', '{"model": "of other fields"}', "[]"])
def test_a_note_of_outputs_that_cannot_be_read_is_none(spec, text, caplog):
    folder = RunFolder.of(spec)
    folder.create()
    folder.stored_outputs.write_text(text)
    assert stored_outputs(spec, prepare.plan(spec).recipe) is None
    assert f"{folder.stored_outputs} cannot be read" in caplog.text
