"""The loss of routers weighs the same however a step is split, and so does that of validation."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels import patch_model
from strata_platform.spec import RunSpec
from strata_platform.spec.sections.training import Training
from tasks.runtime.data import collate
from tasks.runtime.evaluation.evaluate_model import _measure
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations
from tasks.runtime.models.build import build_model
from tasks.runtime.objectives import build_objective, build_validation_objective
from tasks.runtime.objectives.validation_loss import validation_means
from tasks.runtime.process.ranks import Processes

# Of one row, which routers see the same of however often it is there, the targets that each copy has; none, too.
TARGETS = (7, 2, 0, 3)
SPLITS = {"one batch": (4,), "two": (2, 2), "uneven": (3, 1), "rows": (1, 1, 1, 1)}


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return RunSpec(model={"name": str(folder), "dtype": "float32"}, kernels={"enabled": False})


@pytest.fixture(scope="module")
def model(spec):
    return build_model(spec.model, spec.seed)


@pytest.fixture(scope="module")
def rows():
    tokens = torch.arange(3, 13)
    labels = [tokens.where(torch.arange(10) > 9 - targets, -100) for targets in TARGETS]
    return [{"input_ids": tokens, "labels": each, "position_ids": torch.arange(10)} for each in labels]


def batches_of(rows, split):
    left = iter(rows)
    return [collate([next(left) for _ in range(size)]) for size in split]


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_step_learns_the_same_of_routers_however_it_is_split(model, spec, rows, split):
    objective = build_objective(spec, fused=False)
    whole = collate(rows)
    output = model(**{name: whole[name] for name in ("input_ids", "position_ids", "labels")})
    expected = torch.autograd.grad(output.loss, list(model.parameters()))
    items = objective.count(whole)
    loss = sum(objective.micro_batch_loss(model, batch, items).loss for batch in batches_of(rows, split))
    assert output.aux_loss > 1
    assert float(loss.detach()) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)


@pytest.mark.parametrize("recomputed", ["full", "per_op"])
def test_routers_learn_the_same_through_the_kernels_and_recomputed(model, spec, rows, recomputed):
    objective, batch = build_objective(spec, fused=True), collate(rows)
    items = objective.count(batch)
    expected = torch.autograd.grad(
        build_objective(spec, fused=False).micro_batch_loss(model, batch, items).loss, list(model.parameters())
    )
    other = copy.deepcopy(model)
    assert patch_model(other).counts["experts"] == 2
    checkpoint_activations(other, Training(steps=1, gradient_checkpointing=recomputed))
    given = torch.autograd.grad(objective.micro_batch_loss(other, batch, items).loss, list(other.parameters()))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-6)
    routers = [g for (name, _), g in zip(model.named_parameters(), given, strict=True) if "gate.weight" in name]
    assert len(routers) == 2 and all(g.abs().max() > 1e-3 for g in routers)


@pytest.mark.parametrize("kind", ["sft", "distill"])
@pytest.mark.parametrize("rows_in_a_batch", [1, 3, 4])
def test_so_does_validation(model, spec, rows, rows_in_a_batch, kind):
    objective = {"type": kind} | ({"teacher": "some/teacher"} if kind == "distill" else {})
    spec = RunSpec.model_validate({**spec.model_dump(), "objective": objective})
    means = validation_means(
        model,
        build_validation_objective(spec, fused=False),
        [rows[:2], [], rows[2:]],
        Processes(),
        micro_batch_size=rows_in_a_batch,
        max_batches=None,
        collate=collate,
    )
    whole = collate(rows)
    expected = model(**{name: whole[name] for name in ("input_ids", "position_ids", "labels")}).loss
    assert means.of_all == {"loss": pytest.approx(float(expected.detach()), rel=1e-6)}
    # As if each source were there alone.
    first = collate(rows[:2])
    alone = model(**{name: first[name] for name in ("input_ids", "position_ids", "labels")}).loss
    assert means.by_source[:2] == ({"loss": pytest.approx(float(alone.detach()), rel=1e-6)}, {})
    assert means.by_source[2].keys() == {"loss"}


def test_what_is_measured_of_a_trained_model_is_its_loss_of_tokens(model, spec, rows):
    special = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    manifest = SimpleNamespace(has_media=False)
    data = SimpleNamespace(validation_by_source=lambda: [rows], tokenizer=lambda: special, manifest=manifest)
    measured, _ = _measure(spec, data, [], weights=None)
    whole = collate(rows)
    logits = model(input_ids=whole["input_ids"], position_ids=whole["position_ids"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"][:, 1:].flatten())
    assert measured.means == {"loss": pytest.approx(float(expected.detach()), rel=1e-6)}
