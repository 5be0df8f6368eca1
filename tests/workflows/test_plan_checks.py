"""The checks of a plan on a cluster: they run once for runs that are alike, and load nothing when they have passed."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from strata_platform.spec import RunSpec
from tasks.steps import plan_checks

ROOT = Path(__file__).parents[2]


def check_plan(spec):
    plan_checks.check_plan(spec, local=False)


@pytest.fixture
def checked(monkeypatch):
    """Specs that are checked in fact; the checks warn of the model's name."""
    ran = []

    def run_checks(where, needs, spec):
        assert (where, needs) == ("plan", "spec")
        ran.append(spec)
        logging.getLogger("tasks.runtime.models.build").warning("100%% of %s", spec.model.name)

    monkeypatch.setattr(plan_checks, "run_checks", run_checks)
    return ran


def spec_of(output, **sections):
    return RunSpec.model_validate({"output": str(output), **sections})


def test_a_run_that_differs_in_what_no_check_reads_is_not_checked_again(tmp_path, checked, caplog):
    check_plan(spec_of(tmp_path))
    caplog.clear()
    check_plan(spec_of(tmp_path, name="other", seed=3, optimizer={"lr": 1e-5}, training={"steps": 3}))
    assert len(checked) == 1
    # Its warnings hold for this run, too.
    assert caplog.messages == ["100% of tiny-llama"]
    for change in ({"model": {"attention": "eager"}}, {"data": {"packing": False}}, {"resources": {"cpu": "3"}}):
        check_plan(spec_of(tmp_path, **change))
    assert len(checked) == 4


def test_other_packages_or_code_or_files_of_the_model_are_checked_again(tmp_path, checked, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    mine = spec_of(tmp_path, model={"name": str(model)})
    check_plan(mine)
    check_plan(mine)
    assert len(checked) == 1
    (model / "config.json").write_text('{"hidden_size": 64}')
    check_plan(mine)
    assert len(checked) == 2
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(plan_checks.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    check_plan(mine)
    (tmp_path / "site" / "torch-9.0.dist-info").mkdir()
    check_plan(mine)
    assert len(checked) == 4
    monkeypatch.setattr(plan_checks, "_code", lambda: iter(["tasks changed.py 0"]))
    check_plan(mine)
    assert len(checked) == 5


def test_a_link_to_nothing_in_the_folder_of_the_model_is_no_error(tmp_path, checked):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.json").symlink_to(tmp_path / "nowhere")
    check_plan(spec_of(tmp_path, model={"name": str(tmp_path / "model")}))
    assert len(checked) == 1


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"name": "org/model"}},
        {"objective": {"type": "distill", "teacher": "org/teacher"}},
        {"objective": {"type": "custom", "object": "mine.losses:Focal"}},
        {"runtime": {"callbacks": [{"object": "mine.callbacks:Notify"}]}},
        {"evaluation": {"tasks": ["mine.yaml"]}},
        {"export": {"formats": ["gguf"]}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_what_depends_on_more_than_the_spec_is_always_checked(tmp_path, checked, sections):
    for _ in range(2):
        check_plan(spec_of(tmp_path, **sections))
    assert len(checked) == 2 and not list(tmp_path.rglob("*.json"))


def test_a_pod_that_may_not_write_to_the_output_folder_checks_each_time(tmp_path, checked):
    (tmp_path / "data").write_text("a file in place of the folder")
    for _ in range(2):
        check_plan(spec_of(tmp_path))
    assert len(checked) == 2


def test_a_result_that_cannot_be_read_is_found_again(tmp_path, checked):
    check_plan(spec_of(tmp_path))
    (note,) = tmp_path.rglob("*.checked.json")
    note.write_text("")
    for _ in range(2):
        check_plan(spec_of(tmp_path))
    assert len(checked) == 2


def test_a_run_that_fails_a_check_fails_it_again(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, tracking={"report_to": ["wandb"]})

    def fails(*arguments, **named):
        raise ValueError("tracking.report_to has 'wandb'")

    monkeypatch.setattr(plan_checks, "run_checks", fails)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tracking\.report_to"):
            check_plan(spec)


PLANS = """
import json, sys
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from strata_platform.spec import RunSpec
from workflows.finetune import start
from tasks.prepare import plan
context = FlyteContextManager.current_context()
state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
with FlyteContextManager.with_context(context.with_execution_state(state)):
    plan(RunSpec.model_validate_json(sys.argv[1]))
print(json.dumps(sorted(sys.modules)))
"""


def test_a_plan_whose_checks_have_passed_loads_neither_torch_nor_transformers(tmp_path, monkeypatch):
    """The pod of the first task: everything else of the run waits for its imports."""
    monkeypatch.delenv("STRATA_QUEUES", raising=False)
    spec = spec_of(tmp_path, topology={"nnodes": 2}, parallel={"type": "ddp"})
    check_plan(spec)
    other = spec.model_copy(update={"name": "other"})
    command = [sys.executable, "-c", PLANS, other.model_dump_json()]
    planned = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    loaded = set(json.loads(planned.stdout.splitlines()[-1]))
    assert "tasks.steps.plan_checks" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers", "datasets", "strata_kernels", "safetensors"}
