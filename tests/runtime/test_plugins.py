"""A plug-in that is no part of the source tree: the one that the docs show, as their readers would write it."""

import importlib
import json
import sys

import pytest
import yaml

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, recipe_of
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.comparable_runs import file_of
from tests.runtime.helpers.documented_plugin import write_plugin
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec
from tests.workflows.helpers.forked_flyte import pyflyte

FOCAL = {"type": "custom", "object": "my_plugin.losses:Focal"}
CELLS = [("hf", 2), ("lightning", 4), ("torch", 1)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    names = write_plugin(folder)
    sys.path.insert(0, str(folder))
    yield folder, names
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("my_plugin")]:
        del sys.modules[name]


def write_tickets(file):
    rows = [
        {"subject": f"Order {n}", "body": f"Where is order {n}?", "reply": f"Order {n} arrives in {n % 5} days."}
        for n in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_spec(output, name, **sections):
    spec = {
        "name": name,
        "output": str(output),
        "data": {
            "source": str(output / "tickets.jsonl"),
            "format": "my_plugin.formats:Tickets",
            "format_arguments": {"product": "Acme"},
            "sequence_length": 128,
            "validation_fraction": 0.2,
        },
        "objective": FOCAL,
        "training": {"steps": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
        "evaluation": {"samples": 0, "max_batches": 1},
        "tracking": {"log_every": 1, "report_to": []},
    }
    return RunSpec.model_validate(spec | sections)


def curve(spec):
    return [(point.loss, point.grad_norm, point.metrics) for point in read_points(RunFolder.of(spec).metrics)]


def test_the_tests_on_the_pages_pass(plugin):
    _, names = plugin
    assert len(names) == 6
    modules = map(importlib.import_module, ("my_plugin.test_plugin", "my_plugin.test_callbacks"))
    found = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    assert len(found) == 5
    for test in found:
        test()


@pytest.fixture(scope="module")
def trained(plugin, output, narrowed):
    """Specs by framework, each with micro-batches of another size, after training."""
    write_tickets(output / "tickets.jsonl")
    specs = {}
    for framework, size in CELLS:
        training = {"steps": 2, "micro_batch_size": size, "gradient_accumulation_steps": 4 // size}
        runtime = {"framework": framework, "callbacks": [{"object": "my_plugin.callbacks:Journal"}]}
        checkpoint, evaluation = {"every": 1}, {"samples": 0, "max_batches": 1, "every": 2}
        sections = {"training": training, "runtime": runtime, "checkpoint": checkpoint, "evaluation": evaluation}
        spec = make_spec(output, framework, **sections)
        specs[framework] = (spec, train_spec(spec))
    return specs


@pytest.mark.parametrize("framework", ["hf", "lightning"])
def test_it_trains_alike_under_every_framework_and_micro_batch(trained, framework):
    expected = curve(trained["torch"][0])
    assert len(expected) == 2 and expected[0][0] > expected[1][0] > 0
    for (loss, norm, metrics), (other_loss, other_norm, other) in zip(
        curve(trained[framework][0]), expected, strict=True
    ):
        assert (loss, norm) == (pytest.approx(other_loss, rel=1e-5), pytest.approx(other_norm, rel=1e-3))
        assert metrics == pytest.approx(other) and metrics.keys() == {"accuracy"}


Z_LOSS = {"type": "custom", "object": "my_plugin.z_loss:ZLoss", "arguments": {"weight": 0.01}}
# Objective, framework and strategy of two processes.
SPREAD = {
    "focal-ddp": (FOCAL, "lightning", "ddp"),
    "focal-fsdp": (FOCAL, "torch", "fsdp"),
    "z-loss-ddp": (Z_LOSS, "torch", "ddp"),
    "z-loss-fsdp": (Z_LOSS, "hf", "fsdp"),
    "z-loss-zero": (Z_LOSS, "torch", "deepspeed"),
}


def test_two_processes_have_the_losses_of_one(trained, plugin, output):
    """Sums over the items of all processes, with a mean over what `count` counts."""
    training = {"steps": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    alone = make_spec(output, "z-loss", objective=Z_LOSS, training=training)
    train_spec(alone)
    expected = {"focal": curve(trained["torch"][0]), "z": curve(alone)}
    specs = [
        make_spec(
            output,
            name,
            objective=objective,
            training=training | {"gradient_accumulation_steps": 2},
            runtime={"framework": framework},
            parallel={"type": strategy},
            topology={"nproc_per_node": 2},
        )
        for name, (objective, framework, strategy) in SPREAD.items()
    ]
    launch(2, "--narrow", *(file_of(output, spec) for spec in specs), PYTHONPATH=str(plugin[0]))
    for spec in specs:
        for (loss, norm, metrics), (other, other_norm, others) in zip(
            curve(spec), expected[spec.name.partition("-")[0]], strict=True
        ):
            assert (loss, norm) == (pytest.approx(other, rel=1e-5), pytest.approx(other_norm, rel=1e-3)), spec.name
            assert metrics == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("framework", ["hf", "lightning", "torch"])
def test_callbacks_are_called_in_order_under_every_framework(trained, framework):
    spec, record = trained[framework]
    journal = [json.loads(line) for line in (RunFolder.of(spec).root / "journal.jsonl").read_text().splitlines()]
    losses = [point.loss for point in read_points(RunFolder.of(spec).metrics)]
    # The first checkpoint is complete at the end of the second step or of training.
    saved = [entry for entry in journal if "saved" in entry]
    assert saved == [{"saved": step, "folder": f"checkpoint-{step}"} for step in (1, 2)]
    assert [entry for entry in journal if "saved" not in entry] == [
        {"begins": framework, "after": 0, "until": 2},
        {"step": 1, "loss": losses[0]},
        {"step": 2, "loss": losses[1]},
        {"evaluated": 2, "loss": record.evaluations[0].loss},
        {"ends": 2, "loss": losses[1]},
    ]


NOISY = """
import random

import numpy
import torch

from tasks.runtime.extensions import Callback


class Noisy(Callback):
    def on_step_end(self, step):
        random.random(), numpy.random.rand(), torch.rand(3)
        torch.manual_seed(step)


class Failing(Callback):
    def on_step_end(self, step):
        if step == 2:
            raise OSError("the disk is full")
"""


def test_a_callback_changes_no_loss_and_its_exception_ends_the_run_with_its_name(trained, plugin, output):
    (plugin[0] / "my_plugin" / "noisy.py").write_text(NOISY)
    # Its dropout draws from the generators.
    model = {"adapter": {"type": "lora", "lora_dropout": 0.5}, "model": {"name": str(output / "pretrained")}}
    save_pretrained(output / "pretrained")
    quiet, noisy = (
        make_spec(output, name, **model, runtime={"framework": "torch", "callbacks": callbacks})
        for name, callbacks in (("quiet", []), ("noisy", [{"object": "my_plugin.noisy:Noisy"}]))
    )
    for spec in (quiet, noisy):
        train_spec(spec)
    assert curve(noisy) == curve(quiet)
    failing = make_spec(output, "failing", runtime={"callbacks": [{"object": "my_plugin.noisy:Failing"}]})
    with pytest.raises(ValueError, match=r"callbacks\[0\].*Failing': on_step_end raised OSError: the disk is full, in"):
        train_spec(failing)


def test_a_focal_loss_without_focus_is_cross_entropy(trained, output):
    """The built-in objective, which computes its loss by the kernel layer, is the outside view."""
    focal, plain = (
        make_spec(output, name, objective=objective)
        for name, objective in (("gamma-0", {**FOCAL, "arguments": {"gamma": 0}}), ("sft", {"type": "sft"}))
    )
    for spec in (focal, plain):
        train_spec(spec)
    for (loss, norm, _), (other, other_norm, _) in zip(curve(focal), curve(plain), strict=True):
        assert (loss, norm) == (pytest.approx(other, rel=1e-5), pytest.approx(other_norm, rel=1e-4))


def test_evaluation_measures_by_it_and_the_record_has_its_code(trained):
    spec, record = trained["torch"]
    assert record.loss_unit == "focal loss per token"
    names = {"my_plugin.losses:Focal", "my_plugin.formats:Tickets", "my_plugin.callbacks:Journal"}
    assert record.code.keys() == names
    data = PreparedData.load(data_folder(spec.output, recipe_of(spec)))
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    measured = evaluate(spec, record, data, weights)
    assert 0 < measured.eval_loss_after < measured.eval_loss_before
    assert measured.eval_metrics.keys() == {"accuracy"}


def test_a_start_after_its_code_has_changed_says_so(trained, plugin, output, caplog):
    """Of a run that has finished, and of one that goes on."""
    spec = make_spec(output, "edited", checkpoint={"every": 1})
    train_spec(spec)
    train_spec(spec)
    assert "has changed" not in caplog.text
    file = plugin[0] / "my_plugin" / "losses.py"
    before = file.read_text()
    file.write_text(f"{before}\n# edited\n")
    try:
        for step in (None, 1):
            caplog.clear()
            train_spec(spec, step)
            assert "'my_plugin.losses:Focal': its code has changed since the last step of this run" in caplog.text
        caplog.clear()
        train_spec(spec)
        assert "has changed" not in caplog.text
    finally:
        file.write_text(before)


def test_it_runs_as_a_flyte_workflow(plugin, tmp_path):
    write_tickets(tmp_path / "tickets.jsonl")
    spec = make_spec(tmp_path, "flyte", training={"steps": 1, "micro_batch_size": 2})
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    ended = pyflyte("run", "workflows/finetune.py", "finetune", "--spec", str(file), PYTHONPATH=str(plugin[0]))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = CompletionRecord.load(tmp_path / "flyte" / "record.json")
    assert (record.status, record.loss_unit) == ("complete", "focal loss per token")
    assert record.code.keys() == {"my_plugin.losses:Focal", "my_plugin.formats:Tickets"}
