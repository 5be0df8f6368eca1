"""A plug-in that is no part of the source tree: the one that docs/extending.md shows, as its readers would write it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from strata_platform.spec import RunSpec
from tasks.runtime.data import PreparedData, recipe_of
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.run_folder.record import CompletionRecord
from tests.runtime.helpers.documented_plugin import write_plugin
from tests.runtime.helpers.train_only import train_spec

ROOT = Path(__file__).parents[2]
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


def test_the_tests_on_the_page_pass(plugin):
    _, names = plugin
    assert len(names) == 4
    tests = importlib.import_module("my_plugin.test_plugin")
    found = [test for name, test in vars(tests).items() if name.startswith("test_")]
    assert len(found) == 4
    for test in found:
        test()


@pytest.fixture(scope="module")
def trained(plugin, output, narrowed):
    """Specs by framework, each with micro-batches of another size, after training."""
    write_tickets(output / "tickets.jsonl")
    specs = {}
    for framework, size in CELLS:
        training = {"steps": 2, "micro_batch_size": size, "gradient_accumulation_steps": 4 // size}
        spec = make_spec(output, framework, training=training, runtime={"framework": framework})
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
    assert record.code.keys() == {"my_plugin.losses:Focal", "my_plugin.formats:Tickets"}
    data = PreparedData.load(data_folder(spec.output, recipe_of(spec)))
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    measured = evaluate(spec, record, data, weights)
    assert 0 < measured.eval_loss_after < measured.eval_loss_before
    assert measured.eval_metrics.keys() == {"accuracy"}


def test_it_runs_as_a_flyte_workflow(plugin, tmp_path):
    write_tickets(tmp_path / "tickets.jsonl")
    spec = make_spec(tmp_path, "flyte", training={"steps": 1, "micro_batch_size": 2})
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    ended = subprocess.run(
        [Path(sys.executable).with_name("pyflyte"), "run", "workflows/finetune.py", "finetune", "--spec", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{plugin[0]}:{os.environ.get('PYTHONPATH', '')}"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = CompletionRecord.load(tmp_path / "flyte" / "record.json")
    assert (record.status, record.loss_unit) == ("complete", "focal loss per token")
    assert record.code.keys() == {"my_plugin.losses:Focal", "my_plugin.formats:Tickets"}
