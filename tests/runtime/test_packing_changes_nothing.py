"""Eight documents in one row are learned as the eight by themselves: alike in loss, gradients and weights."""

import json
from typing import get_args

import pytest
import torch

from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.run_spec import Runtime
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.state import read_model_tensors
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.data import collate, fingerprint, prepare
from tasks.runtime.models.build import build_model, has_fused_loss, patch
from tasks.runtime.objectives import build_objective
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.run_folder.metrics_file import read_points
from tests.runtime.helpers.train_only import train_spec

DOCUMENTS = 8
FRAMEWORKS = get_args(Runtime.model_fields["framework"].annotation)


def make_spec(folder, packing, framework="torch", **changes):
    """One step over all documents, in one row or in a row each."""
    return RunSpec.model_validate(
        {
            "name": f"{framework}-{'packed' if packing else 'alone'}",
            "output": str(folder / "out"),
            "model": {"dtype": "float32"},
            "data": {
                "source": str(folder / "rows.jsonl"),
                "sequence_length": 512,
                "packing": packing,
                "validation_fraction": 0.0,
            },
            "training": {"steps": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 1 if packing else DOCUMENTS},
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "schedule": {"warmup_ratio": 0.0},
            "runtime": {"framework": framework},
            "tracking": {"report_to": []},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    rows = [
        {"prompt": f"Count from {n} to {2 * n}: ", "completion": ", ".join(map(str, range(n, 2 * n + 1)))}
        for n in range(1, DOCUMENTS + 1)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(spec):
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    train = prepare(recipe, data_folder(spec.output, recipe), report=print).train
    return [train[index] for index in range(len(train))]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kernels", [True, False], ids=["fused", "plain"])
def test_loss_and_gradients_are_those_of_the_documents_alone(folder, attention, kernels):
    found = []
    for packing in (True, False):
        spec = make_spec(folder, packing, model={"attention": attention}, kernels={"enabled": kernels})
        model = build_model(spec.model, spec.seed).train()
        objective = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
        batches = [collate([row]) for row in rows_of(spec)]
        assert len(batches) == (1 if packing else DOCUMENTS)
        items = sum(objective.count(batch) for batch in batches)
        losses = [objective.micro_batch_loss(model, batch, items).loss for batch in batches]
        sum(losses).backward()
        found.append((float(sum(losses).detach()), items, {n: p.grad for n, p in model.named_parameters()}))
    packed, alone = found
    assert packed[0] == pytest.approx(alone[0], rel=1e-6) and packed[1] == alone[1]
    for name, gradient in alone[2].items():
        assert (packed[2][name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_of_training_is_that_of_the_documents_alone(folder, framework):
    points, weights = [], []
    for packing in (True, False):
        spec = make_spec(folder, packing, framework)
        assert train_spec(spec).status == "complete"
        points += read_points(RunFolder.of(spec).metrics)
        weights.append(read_model_tensors(Index(checkpoint.latest(RunFolder.of(spec).checkpoints))))
    packed, alone = points
    assert packed.loss == pytest.approx(alone.loss, rel=1e-6)
    assert packed.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
    assert packed.target_tokens == alone.target_tokens
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
