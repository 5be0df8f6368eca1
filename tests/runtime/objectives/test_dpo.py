"""DPO: the loss against a plain derivation in fp64, whatever the packing, the head and the source of the reference."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from strata_platform.spec import RunSpec
from tasks.runtime.data import collate, collate_flat
from tasks.runtime.models.adapters.lora import add_adapter, without_adapter
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.reference import reference_file, score_rows
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers.preference_pairs import PAIRS as ALL
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.small_answers import answers_of, data_of, log_prob, small_model

PAIRS = ALL[:12]


def make_spec(folder, objective=None, **changes):
    return RunSpec.model_validate(
        {
            "output": str(folder / "out"),
            "data": {"source": str(folder / "pairs.jsonl"), "sequence_length": 96},
            "objective": {"type": "dpo", **(objective or {})},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    write_pairs(folder / "pairs.jsonl", PAIRS)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """Packed rows, of several pairs each."""
    train = data_of(make_spec(folder)).train
    assert 3 < len(train) < len(PAIRS) - 2
    return [train[index] for index in range(len(train))]


def derived(policy, reference, rows, settings):
    """Loss and accuracy as the papers have them, answer by answer."""
    growth, tokens = [], []
    for ids, labels in answers_of(rows):
        with torch.no_grad():
            first = log_prob(reference, ids, labels)
        growth.append(log_prob(policy, ids, labels) - first)
        tokens.append(int((labels != -100).sum()))
    chosen, rejected = torch.stack(growth[::2]), torch.stack(growth[1::2])
    if settings.loss == "ipo":
        lengths = torch.tensor(tokens)
        losses = (chosen / lengths[::2] - rejected / lengths[1::2] - 1 / (2 * settings.beta)) ** 2
    else:
        z = settings.beta * (chosen - rejected)
        losses = -(1 - settings.label_smoothing) * logsigmoid(z) - settings.label_smoothing * logsigmoid(-z)
    return losses.mean(), float((chosen > rejected).double().mean())


@pytest.mark.parametrize("head", ["fused", "plain"])
@pytest.mark.parametrize(
    "objective",
    [{}, {"beta": 0.5, "label_smoothing": 0.2}, {"loss": "ipo"}],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_loss_and_gradients_are_those_of_the_papers(folder, rows, objective, head):
    spec = make_spec(folder, objective, kernels={"enabled": head == "fused"})
    exact = small_model(0.1).double()
    expected, accuracy = derived(exact, small_model().double(), rows, spec.objective)
    expected.backward()

    first, model = small_model(), small_model(0.1)
    patch(first, spec.kernels)
    ours = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
    items = sum(ours.count(collate([row])) for row in rows)
    assert int(items) == len(answers_of(rows)) / 2
    total = {}
    # Micro-batches of uneven shares; rows in one line are what flash attention is given.
    for batch in (collate(rows[:1]), collate(rows[1:3]), collate_flat(rows[3:])):
        share = ours.micro_batch_loss(model.train(), {**batch, "reference": ours.log_probs(first, batch)}, items)
        share.loss.backward()
        for name, value in {"loss": share.loss.detach(), **share.metrics}.items():
            total[name] = total.get(name, 0.0) + float(value)
    assert total["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert total["reward_accuracy"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1
    assert total["reward_margin"] == pytest.approx(total["reward_chosen"] - total["reward_rejected"], abs=1e-5)
    for (name, parameter), true in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (parameter.grad - true.grad).norm() < 1e-4 * true.grad.norm(), name


def test_pairs_share_a_row_and_are_told_apart(folder, rows):
    tokenizer = data_of(make_spec(folder)).tokenizer()
    found = []
    for row in rows:
        assert (row["sides"][row["labels"] != -100] != 0).all()
        answers = answers_of([row])
        assert {len(answers) % 2} == {0}
        texts = [tokenizer.decode(ids[labels != -100], skip_special_tokens=True) for ids, labels in answers]
        found += zip(texts[::2], texts[1::2], strict=True)
    held_out = len(PAIRS) - len(found)
    assert held_out == 1
    assert set(found) < {(pair["chosen"], pair["rejected"]) for pair in PAIRS}


def test_the_reference_comes_with_the_row_that_it_is_of(folder, rows):
    spec = make_spec(folder)
    data, model = data_of(spec), small_model()
    ours = build_objective(spec, fused=False)
    found = score_rows(data.train, 5, lambda batch: ours.scores(model, batch), Processes(), 2, collate)
    given = data.with_reference_log_probs(train=found).train
    for index in (4, 0, 2):
        row = given[index]
        assert torch.equal(row["input_ids"], rows[index]["input_ids"])
        told = row["reference"] != 0
        expected = [float(log_prob(model, ids, labels).detach()) for ids, labels in answers_of([row])]
        assert row["reference"][told].tolist() == pytest.approx(expected, rel=1e-5)
        assert torch.equal(told, (row["position_ids"] == 0) & (row["sides"] != 0))


def test_references_of_rounded_and_of_exact_weights_are_kept_apart(folder):
    def name(**adapter):
        changes = {"model": {"name": "some/model"}, "adapter": {"type": "lora", **adapter}}
        return reference_file(make_spec(folder, {"reference": "precomputed"}, **changes), "data", "base").name

    assert (name(), name(quantization="nf4")) == ("data-base-float32.safetensors", "data-base-float32-nf4.safetensors")
    assert name(r=4) == name()


def test_references_of_models_that_runs_began_with_are_kept_apart(tmp_path):
    spec = make_spec(tmp_path, {"reference": "precomputed"}, model={"name": "some/model"}, adapter={"type": "lora"})
    folder, names = RunFolder.of(spec), set()
    folder.create()
    for model, adapter in (("", ""), ("a-b", ""), ("a-c", ""), ("a-b", "d-e")):
        ids = {"model.name": model, "adapter.init_from": adapter}
        folder.write_initial_weights_ids({field: identity for field, identity in ids.items() if identity})
        names.add(reference_file(spec, "data", "base").name)
    assert len(names) == 4
    # Of a run that began before these were noted.
    assert "data-base-float32.safetensors" in names


def test_the_reference_has_no_dropout_while_the_model_trains_with_it(folder, rows):
    model, batch = small_model(), collate(rows[:2])
    answers = answers_of(rows[:2])
    with torch.no_grad():
        expected = [float(log_prob(model.eval(), ids, labels)) for ids, labels in answers]
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    ours = build_objective(make_spec(folder), fused=False)
    assert ours.scores(model.train(), batch)[: len(expected)].tolist() == pytest.approx(expected, rel=1e-5)
    assert model.training
    with torch.no_grad():
        dropped = [float(log_prob(model, ids, labels)) for ids, labels in answers]
    assert dropped != pytest.approx(expected, rel=1e-3)


def test_a_model_that_has_not_moved_is_indifferent(folder, rows):
    model, batch = small_model(), collate(rows)
    ours = build_objective(make_spec(folder), fused=False)
    share = ours.micro_batch_loss(model, {**batch, "reference": ours.log_probs(model, batch)}, ours.count(batch))
    assert float(share.loss.detach()) == pytest.approx(math.log(2))
    assert {float(value) for value in share.metrics.values()} == {0.0}


def test_without_its_adapter_a_model_is_the_one_it_was(folder, rows):
    spec = make_spec(folder, model={"name": "some/model"}, adapter={"type": "lora", "r": 2})
    model, batch = small_model(), collate(rows[:2])
    ours = build_objective(spec, fused=False)
    before = ours.log_probs(model, batch)
    add_adapter(model, spec.adapter, spec.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    given = ours.micro_batch_loss(model.train(), {**batch, "reference": before}, ours.count(batch))
    found = ours.micro_batch_loss(model, batch, ours.count(batch))
    assert torch.equal(found.loss, given.loss) and float(found.loss.detach()) != pytest.approx(math.log(2))
    assert model.training
    assert learning == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with without_adapter(model):
        assert torch.equal(ours.log_probs(model, batch), before)
    assert not torch.equal(ours.log_probs(model, batch), before)


def test_the_warm_up_plans_the_step_that_is_taken(folder):
    """The gradients of tokens wait for those of the pairs; next-token prediction has them before, up to a factor."""
    dpo, sft = plan_kernels(make_spec(folder)), plan_kernels(RunSpec())
    names = [{item.name for item in plan.specializations} for plan in (dpo, sft)]
    assert names[1] - names[0] == {"multiply_kernel"} and "cross_entropy_kernel" in names[0]
