"""Objectives under frameworks and strategies: the losses of one process, exact resumes, and what comes out at the end.

Not the whole product of choices, as in `test_frameworks_and_strategies`: an objective sees neither of them.
"""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.evaluation.evaluate_model import evaluate
from tasks.runtime.export.export_model import export
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_evaluations
from tests.runtime.helpers.preference_pairs import PAIRS, write_pairs
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("forked_readers", "narrowed")
STEPS, SAVED = 4, 2
# Framework, strategy and adapter by objective. Without an adapter the reference is computed before.
CELLS = {
    "dpo": [
        ("torch", "fsdp", "none"), ("lightning", "ddp", "none"), ("hf", "fsdp", "lora"), ("hf", "zero-3", "none"),
        ("torch", "zero-3", "lora"), ("torch", "tensor-parallel", "none"),
    ],
    "orpo": [("hf", "ddp", "lora"), ("hf", "tensor-parallel", "none")],
    "simpo": [("torch", "tensor-parallel", "none")],
    "cpo": [("torch", "zero-2", "none"), ("lightning", "tensor-parallel", "none")],
    "reward": [("torch", "fsdp", "none"), ("torch", "zero-3", "lora"), ("torch", "tensor-parallel", "none")],
    # Without packing no two processes read the same number of tokens.
    "kto": [
        ("lightning", "fsdp", "none"), ("torch", "ddp", "lora"), ("hf", "zero-3", "none"),
        ("torch", "tensor-parallel", "none"),
    ],
    "distill": [("hf", "fsdp", "none"), ("torch", "ddp", "lora"), ("torch", "tensor-parallel", "none")],
    "on-policy": [("torch", "fsdp", "none"), ("lightning", "fsdp", "lora"), ("hf", "tensor-parallel", "none")],
}  # fmt: skip
ANSWERS = {"completion_column": "chosen", "packing": False}
DATA = {"distill": ANSWERS, "on-policy": ANSWERS, "kto": {"packing": False}}
ON_POLICY = {
    "type": "distill", "on_policy": 1, "weight": 1, "divergence": "reverse_kl", "generation": {"max_new_tokens": 8}
}  # fmt: skip
PARALLEL = {f"zero-{stage}": {"type": "deepspeed", "stage": stage} for stage in (2, 3)}
PARALLEL["tensor-parallel"] = {"type": "fsdp", "tensor_parallel": 2}
NAMES = [(objective, *cell) for objective, cells in CELLS.items() for cell in cells]
# An objective with an adapter, and without, comes back alike whatever is around it: the first cell of each.
RESUMED = list({(name[0], name[-1]): name for name in reversed(NAMES)}.values())


def make_spec(output, name, objective, framework, strategy, adapter, processes):
    """Four rows a step, however they are spread."""
    readers = 1 if strategy == "tensor-parallel" else processes
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "model": {"name": f"{output}/pretrained"},
            "data": {
                "source": f"{output}/{'answers' if objective == 'kto' else 'pairs'}.jsonl",
                "sequence_length": 96,
                "validation_fraction": 0.2,
            }
            | DATA.get(objective, {}),
            "objective": (ON_POLICY if objective == "on-policy" else {"type": objective})
            | ({"teacher": f"{output}/teacher"} if objective in ("distill", "on-policy") else {}),
            "adapter": {"type": adapter},
            "training": {"steps": STEPS, "micro_batch_size": 2, "gradient_accumulation_steps": 2 // readers},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": SAVED, "keep_last": STEPS},
            "evaluation": {"samples": 1, "max_new_tokens": 4, "every": SAVED},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
            "parallel": PARALLEL.get(strategy, {"type": strategy}),
            "topology": {"nproc_per_node": processes},
        }
    )


def data_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, data_folder(spec.output, recipe), report=print)


def curve(spec, attempt=0):
    """What is told of each step of an attempt."""
    points = map(json.loads, RunFolder.of(spec).metrics.read_text().splitlines())
    names = ("loss", "grad_norm", "tokens", "target_tokens", "metrics")
    found = [point for point in points if point["attempt"] == attempt and "loss" in point]
    for point in found:
        for time in ("generation_share", "generated_tokens_per_second"):
            point["metrics"].pop(time, None)
    return [tuple(point[name] for name in names) for point in found]


def evaluations(spec):
    """Step, loss and metrics of each evaluation during training."""
    points = read_evaluations(RunFolder.of(spec).metrics)
    return [
        (
            point.step,
            pytest.approx(point.loss, rel=1e-5, abs=1e-6),
            pytest.approx(dict(point.metrics), rel=1e-3, abs=1e-5),
        )
        for point in points
    ]


@pytest.fixture(scope="module")
def output(output):
    save_pretrained(output / "pretrained")
    shutil.copytree(output / "pretrained", output / "teacher", ignore=shutil.ignore_patterns("made"))
    teacher = AutoModelForCausalLM.from_pretrained(output / "pretrained")
    with torch.no_grad():
        teacher.lm_head.weight *= 4.0
    teacher.save_pretrained(output / "teacher")
    write_pairs(output / "pairs.jsonl")
    # Mostly good ones: all answers become likelier, so that the divergence is above 0.
    good = [{"prompt": pair["prompt"], "completion": pair["chosen"], "label": True} for pair in PAIRS[:18]]
    bad = [{"prompt": pair["prompt"], "completion": pair["rejected"], "label": False} for pair in PAIRS[:6]]
    rows = [*good, *bad]
    write_pairs(output / "answers.jsonl", rows)
    return output


@pytest.fixture(scope="module")
def alone(output):
    """Finished runs of the plain loop in one process, by objective and adapter: spec and record."""
    keys = dict.fromkeys((objective, adapter) for objective, _, _, adapter in NAMES)
    specs = {key: make_spec(output, f"alone-{'-'.join(key)}", key[0], "torch", "single", key[1], 1) for key in keys}
    return {key: (spec, train_spec(spec)) for key, spec in specs.items()}


@pytest.fixture(scope="module")
def trained(output, alone):
    """Specs of runs by two processes. Those of `RESUMED` are trained again from their first checkpoint."""
    specs = {name: make_spec(output, "-".join(name), *name, 2) for name in NAMES}
    for spec in specs.values():
        (output / f"{spec.name}.json").write_text(spec.model_dump_json())
    files = {name: f"{output}/{spec.name}.json" for name, spec in specs.items()}
    launch(2, *files.values(), *(f"{files[name]}@{SAVED}" for name in RESUMED))
    return specs


@pytest.mark.parametrize("name", NAMES, ids="-".join)
def test_losses_and_metrics_are_those_of_one_process(trained, alone, name):
    expected = curve(alone[name[0], name[-1]][0])
    for (loss, norm, *counts, metrics), one in zip(curve(trained[name]), expected, strict=True):
        # Small losses at the end are what is left of log(2), with its rounding.
        close = pytest.approx(one[0], rel=1e-5, abs=1e-6)
        assert (loss, norm, *counts) == (close, pytest.approx(one[1], rel=1e-3), *one[2:-1])
        if abs(one[-1].get("reward_margin", 1.0)) < 1e-5:
            # The model is the reference: rounding decides which answer has the higher reward.
            metrics = {**metrics, "reward_accuracy": one[-1]["reward_accuracy"]}
        assert metrics == pytest.approx(one[-1], rel=1e-3, abs=1e-5)
    found = read_evaluations(RunFolder.of(trained[name]).metrics)
    assert len(found) == STEPS // SAVED
    assert [(e.step, e.loss, e.metrics) for e in found] == evaluations(alone[name[0], name[-1]][0])


@pytest.mark.parametrize("name", RESUMED, ids="-".join)
def test_a_resumed_run_computes_the_same_bits(trained, name):
    first, again = (curve(trained[name], attempt) for attempt in (0, 1))
    assert again == first[SAVED:] and len(first) == STEPS


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_dpo_learns_to_prefer(alone, adapter):
    points = curve(alone["dpo", adapter][0])
    assert points[0][0] == pytest.approx(math.log(2)) and points[0][-1]["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert points[-1][0] < points[0][0] - 0.01 and points[-1][-1]["reward_accuracy"] > 0.8


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_kto_raises_good_answers_above_bad_ones(alone, adapter):
    points = curve(alone["kto", adapter][0])
    assert points[0][0] == pytest.approx(0.5, abs=1e-6)
    assert points[-1][-1]["reward_margin"] > 0 and points[-1][0] < 0.5
    assert max(metrics["kl"] for *_, metrics in points) > 0.1


def test_orpo_learns_one_answer_and_prefers_it(alone):
    points = curve(alone["orpo", "lora"][0])
    first, last = points[0][-1], points[-1][-1]
    assert last["next_token_loss"] < first["next_token_loss"] and last["log_odds_ratio"] > first["log_odds_ratio"]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_distillation_comes_closer_to_the_teacher(alone, output, adapter):
    spec, record = alone["distill", adapter]
    told = [metrics for *_, metrics in curve(spec)]
    assert told[-1]["forward_kl"] < told[0]["forward_kl"]
    weights = collect_weights(RunFolder.of(spec), spec.adapter, record)
    record = evaluate(spec, record, data_of(spec), weights)
    assert record.evaluations[-1].loss == pytest.approx(record.eval_loss_after, rel=1e-5)
    assert record.loss_unit == "nats per token" and record.eval_loss_after < record.eval_loss_before
    assert "Perplexity" in export(spec, record, data_of(spec), weights).report.read_text()


def reference_files(alone, output):
    """Those of DPO's rows, of the training split first."""
    rows = data_of(alone["dpo", "none"][0]).manifest.content_hash
    return sorted((output / "reference").glob(f"{rows}-*"), key=lambda file: len(file.name))


def test_the_reference_is_computed_once_for_all_runs_of_the_same_rows(trained, alone, output):
    train, validation = reference_files(alone, output)
    assert validation.name == f"{train.stem}-validation.safetensors"


@pytest.mark.parametrize(
    ("split", "told"),
    [("train", r"objective\.reference 'precomputed'.*restore it"), ("validation", r"evaluation\.every")],
)
def test_a_run_does_not_go_on_without_its_reference(alone, output, split, told):
    spec, _ = alone["dpo", "none"]
    file = reference_files(alone, output)[split == "validation"]
    file.rename(output / "moved")
    try:
        with pytest.raises(ValueError, match=told):
            train_spec(spec, SAVED)
    finally:
        (output / "moved").rename(file)
    assert train_spec(spec).status == "complete"


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_what_comes_out_is_measured_against_the_first_model(alone, adapter):
    spec, record = alone["dpo", adapter]
    data, weights = data_of(spec), collect_weights(RunFolder.of(spec), spec.adapter, record)
    record = evaluate(spec, record, data, weights)
    assert record.eval_loss_before == pytest.approx(math.log(2))
    assert record.eval_loss_after < record.eval_loss_before - 0.01
    assert record.evaluations[-1].loss == pytest.approx(record.eval_loss_after, rel=1e-4)
    assert record.evaluations[-1].metrics == pytest.approx(record.eval_metrics, rel=1e-3, abs=1e-5)
    assert record.eval_metrics["reward_accuracy"] > 0.8
    page = export(spec, record, data, weights).report.read_text()
    assert "Reward accuracy" in page and "Reward margin" in page
