"""The first task of a run starts what is left of it: neither data that are stored, nor a run that has finished."""

import json
import logging
import shutil
import sys
from types import SimpleNamespace

import fsspec
import pytest
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.types.directory import FlyteDirectory
from safetensors.torch import load_file, save_file

from strata_platform import kept_log
from strata_platform.spec import DataRecipe, RunSpec
from tasks import finish, prepare
from tasks.runtime.extensions.own_code import objective_code
from tasks.runtime.models.initial_weights import initial_weights
from tasks.runtime.run_folder import kept_logs
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.steps.finish_step import stored_outputs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.workflows.test_serialization import compiled_by
from workflows.finetune import start


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A run on a cluster, whose object store is in memory."""
    for module in (prepare, finish, kept_logs):
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
    stored = prepare.prepare.task_function(planned.recipe, planned.output, planned.url, spec).data.remote_source
    other = spec.model_copy(update={"name": "other", "optimizer": spec.optimizer.model_copy(update={"lr": 1e-5})})
    nodes, _ = started(other)
    assert set(nodes) == TRAINING
    inputs = {item.var: item.binding for item in nodes["tasks.topology.train_2x1"].inputs}
    assert inputs["data"].scalar.blob.uri == stored
    # Other data, and data that the store has no longer.
    assert PREPARE in started(spec.model_copy(update={"data": spec.data.model_copy(update={"sequence_length": 64})}))[0]
    STORE.rm(stored, recursive=True)
    assert set(started(other)[0]) == {PREPARE, *TRAINING}


def said(folder):
    """The lines of each log that is kept in a folder, by the name of its file."""
    return {path.name: texts(path) for path in sorted(folder.glob("*.jsonl"))}


def texts(path):
    """Without the warning that pytest's folder is not on a volume."""
    found = [line.text for line in kept_log.parse(path.name, path.read_bytes())]
    return [text for text in found if "is on the pod's own disk" not in text]


def prepared_by(spec, pod, monkeypatch):
    """The task that prepares, in a pod of its own."""
    monkeypatch.setenv("STRATA_POD", pod)
    planned = prepare.plan(spec)
    return prepare.prepare.task_function(planned.recipe, planned.output, planned.url, spec).data.remote_source


@pytest.fixture
def logged():
    """The project's lines reach a stream that the log is kept of, as `configure_logging` has it in a pod."""
    logger, handler = logging.getLogger("tasks"), logging.StreamHandler(sys.stdout)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_logs_of_pods_that_plan_and_prepare_are_kept_and_a_run_that_reuses_the_data_copies_them(
    spec, tmp_path, monkeypatch, logged
):
    spec = spec.model_copy(update={"name": "first"})
    monkeypatch.setenv("STRATA_POD", "first-n0-0")
    started(spec)
    stored = prepared_by(spec, "first-n0-0-dn0-0", monkeypatch)
    # Of the same second, so in the order of the pods' names.
    prepared, planned = sorted(said(RunFolder.of(spec).logs).items(), key=lambda item: item[0].partition("-")[2])
    recipe = prepare.plan(spec).recipe
    assert prepared[0].endswith("-first-n0-0-dn0-0.prepare.jsonl") and planned[0].endswith("-first-n0-0.plan.jsonl")
    assert planned[1][-1] == f"preparing data {recipe.hash()}"
    assert any("rows.jsonl: format text" in line for line in prepared[1]) and "prepared in" in prepared[1][-1]
    beside = data_folder(spec.output, recipe).with_name(f"{recipe.hash()}.logs")
    assert said(beside) == dict([prepared])

    url = f"memory://{tmp_path.name}/copies"
    other = spec.model_copy(update={"name": "second", "checkpoint": spec.checkpoint.model_copy(update={"url": url})})
    monkeypatch.setenv("STRATA_POD", "second-n0-0")
    assert PREPARE not in started(other)[0]
    kept = said(RunFolder.of(other).logs)
    (own,) = [lines for name, lines in kept.items() if name.endswith("-second-n0-0.plan.jsonl")]
    assert own[0] == f"reusing prepared data {recipe.hash()}, stored at {stored}"
    assert kept[prepared[0]] == prepared[1] and len(kept) == 2
    assert {name.rpartition("/")[2] for name in STORE.ls(f"{url}/second/logs", detail=False)} == set(kept)


def test_a_run_that_is_rejected_and_data_that_cannot_be_prepared_leave_their_log(spec, tmp_path, monkeypatch):
    wrong = spec.model_copy(
        update={"name": "wrong", "data": spec.data.model_copy(update={"source": "/nowhere/rows.jsonl"})}
    )
    with pytest.raises(ValueError):
        started(wrong)
    ((_, lines),) = said(RunFolder.of(wrong).logs).items()
    assert lines[0].startswith("Traceback") and "/nowhere/rows.jsonl" in lines[-1]

    bad = spec.model_copy(update={"name": "bad"})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"text": 7}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        prepared_by(bad, "bad-n0-0-dn0-0", monkeypatch)
    ((name, lines),) = said(RunFolder.of(bad).logs).items()
    assert name.endswith("-bad-n0-0-dn0-0.prepare.jsonl") and any("ValueError" in line for line in lines)
    assert said(data_folder(bad.output, prepare.plan(bad).recipe).with_name(f"{prepare.plan(bad).recipe.hash()}.logs"))


@pytest.mark.parametrize("name", ["prepare_share", "complete"])
def test_the_other_pods_that_prepare_keep_their_log(spec, name, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("a part is damaged")

    monkeypatch.setattr(prepare.steps, name, fail)
    given = {"prepare_share": {"share": "0:0-1"}, "complete": {"prepared": [2]}}[name]
    with pytest.raises(ValueError, match="damaged"):
        getattr(prepare, name).task_function(data=FlyteDirectory(str(tmp_path)), spec=spec, **given)
    ((file, lines),) = said(RunFolder.of(spec).logs).items()
    assert file.endswith(".prepare.jsonl") and lines[-1] == "ValueError: a part is damaged"


def test_a_store_that_does_not_answer_costs_a_log_and_no_run(spec, monkeypatch, caplog, capsys):
    def away(url, field):
        raise ConnectionError(f"no route to {url}")

    monkeypatch.setattr(kept_logs, "open_url", away)
    url = "s3://me:word@bucket/runs"
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"url": url})})
    assert prepared_by(spec, "away-n0-0-dn0-0", monkeypatch)
    assert "cannot be copied to" in caplog.text and "no route to s3://...@bucket" in caplog.text
    assert "word" not in capsys.readouterr().out and len(said(RunFolder.of(spec).logs)) == 1


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


@pytest.mark.parametrize("field", ["model.name", "model.name of an adapter", "objective.teacher"])
def test_outputs_of_a_run_that_began_with_other_weights_are_not_returned(spec, tmp_path, field):
    """Its spec is the same, so its hash is."""
    model = save_pretrained(tmp_path / "model")
    values = spec.model_dump() | {"model": {"name": str(model)}}
    if "adapter" in field:
        values["adapter"] = {"type": "lora"}
    if field == "objective.teacher":
        model = shutil.copytree(model, tmp_path / "teacher", ignore=shutil.ignore_patterns("made"))
        values["objective"] = {"type": "distill", "teacher": str(model)}
    spec = RunSpec.model_validate(values)
    folder, stored = RunFolder.of(spec), f"memory://{tmp_path.name}/outputs"
    folder.create()
    folder.write_initial_weights_ids(initial_weights(spec))
    STORE.pipe(f"{stored}/config.json", b"{}")
    outputs = finish.steps.Outputs(spec.hash(), prepare.plan(spec).recipe.hash(), *3 * [stored])
    finish.steps.note_outputs(folder, outputs)
    assert not started(spec)[0]
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    said = rf"{field.partition(' ')[0]} '{model}' has other weights than when this run began"
    with pytest.raises(ValueError, match=said):
        started(spec)


def test_outputs_of_a_run_whose_code_has_changed_since_are_returned_with_a_warning(tmp_path, caplog, monkeypatch):
    (tmp_path / "own_focus_here.py").write_text("class Focus: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    objective = {"type": "custom", "object": "own_focus_here:Focus"}
    spec = RunSpec.model_validate({"output": str(tmp_path / "out"), "objective": objective})
    recipe, folder = DataRecipe.from_spec(spec), RunFolder.of(spec)
    folder.create()
    outputs = finish.steps.Outputs(spec.hash(), recipe.hash(), *3 * ["s3://runs"])
    finish.steps.note_outputs(folder, outputs)
    code = objective_code(spec.objective)
    monkeypatch.setattr(CompletionRecord, "load", lambda path: SimpleNamespace(code=code))
    folder.record.touch()
    assert stored_outputs(spec, recipe) == outputs and not caplog.text
    (tmp_path / "own_focus_here.py").write_text("class Focus: gamma = 2\n")
    assert stored_outputs(spec, recipe) == outputs
    assert "'own_focus_here:Focus': its code has changed since the last step of this run" in caplog.text


def test_outputs_are_created_again_with_other_tasks_in_a_file_of_the_evaluation(tmp_path):
    """Their scores were of the former ones."""
    task = tmp_path / "opposites.yaml"
    task.write_text("task: opposites\nnum_fewshot: 0\n")
    evaluation = {"tasks": ["hellaswag", str(task)]}
    spec = RunSpec.model_validate({"output": str(tmp_path / "out"), "evaluation": evaluation})
    recipe, folder = DataRecipe.from_spec(spec), RunFolder.of(spec)
    folder.create()
    outputs = finish.steps.Outputs(finish.steps.spec_hash(spec), recipe.hash(), *3 * ["s3://runs"])
    finish.steps.note_outputs(folder, outputs)
    assert stored_outputs(spec, recipe) == outputs
    task.write_text("task: opposites\nnum_fewshot: 2\n")
    assert stored_outputs(spec, recipe) is None


@pytest.mark.parametrize("text", ['{"spec_hash": "a', '{"model": "of other fields"}', "[]"])
def test_a_note_of_outputs_that_cannot_be_read_is_none(spec, text, caplog):
    folder = RunFolder.of(spec)
    folder.create()
    folder.stored_outputs.write_text(text)
    assert stored_outputs(spec, prepare.plan(spec).recipe) is None
    assert f"{folder.stored_outputs} cannot be read" in caplog.text
