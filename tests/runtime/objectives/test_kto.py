"""KTO: the loss against a plain derivation in fp64, whatever the packing, micro-batches, head and reference."""

import json
import math
from itertools import pairwise

import pytest
import torch

from strata_kernels.row_buckets import row_buckets
from strata_platform.spec import RunSpec
from tasks.runtime.data import collate, collate_flat
from tasks.runtime.data.dataset import IGNORE_INDEX
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.attention.varlen_attention import add_cu_seqlens
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.kto import Kto, mismatched
from tasks.runtime.objectives.reference import score_rows
from tasks.runtime.objectives.validation_loss import validation_means
from tasks.runtime.process.ranks import Processes
from tasks.runtime.warmup.plan import plan_kernels
from tests.runtime.helpers.preference_pairs import PAIRS
from tests.runtime.helpers.small_answers import answers_of, data_of, log_prob, small_model

# Answers of one token, and its end, among them.
ROWS = [
    {"prompt": pair["prompt"], "completion": pair["rejected"] if n % 3 else "a", "label": n % 4 > 0}
    for n, pair in enumerate(PAIRS[:14])
]
OBJECTIVES = {
    "kto": {"beta": 0.3, "desirable_weight": 2.0},
    "apo": {"beta": 0.3, "loss": "apo_zero_unpaired", "undesirable_weight": 0.5},
}


def make_spec(folder, objective=None, data=None, **changes):
    data = {"source": str(folder / "rows.jsonl"), "sequence_length": 48, "validation_fraction": 0, **(data or {})}
    objective = {"type": "kto", **(objective or {})}
    return RunSpec.model_validate({"output": str(folder / "out"), "data": data, "objective": objective, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kto")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """Packed rows, of several answers each but for the last."""
    train = data_of(make_spec(folder)).train
    assert 3 < len(train) < len(ROWS) - 2
    return [train[index] for index in range(len(train))]


def prompt_and_answer(ids, labels):
    first = int((labels != IGNORE_INDEX).nonzero()[0])
    return ids[:first], ids[first:]


def others_of(rows):
    """Each prompt with the answer before it in its row, of a single one with that of the row before; all by hand."""
    found = []
    for number, row in enumerate(rows):
        answers = [prompt_and_answer(*answer) for answer in answers_of([row])]
        before = answers if len(answers) > 1 else [prompt_and_answer(*a) for a in answers_of([rows[number - 1]])]
        for (prompt, own), (_, other) in zip(answers, [before[-1], *answers[:-1]], strict=True):
            assert own.numel()
            ids = torch.cat([prompt, other])[:48]
            found.append((ids, torch.cat([torch.full_like(prompt, IGNORE_INDEX), ids[prompt.numel() :]])))
    return found


def derived(policy, reference, rows, settings):
    """Loss and KL as the papers have them, answer by answer."""

    def grown(answers):
        with torch.no_grad():
            first = [log_prob(reference, *answer) for answer in answers]
        return torch.stack([log_prob(policy, *answer) - one for answer, one in zip(answers, first, strict=True)])

    with torch.no_grad():
        kl = grown(others_of(rows)).mean().clamp(min=0) if settings.loss == "kto" else torch.zeros(())
    good = torch.tensor([bool(row["sides"][begin] == 1) for row in rows for begin in begins_of(row)])
    growth = grown(answers_of(rows))
    up = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (growth - kl)))
    down = settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (kl - growth)))
    return torch.where(good, up, down).mean(), float(kl), settings.beta * growth, good


def begins_of(row):
    return ((row["position_ids"] == 0) & (row["sides"] != 0)).nonzero().flatten().tolist()


@pytest.mark.parametrize("head", ["fused", "plain"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_those_of_the_papers(folder, rows, name, head):
    spec = make_spec(folder, OBJECTIVES[name], kernels={"enabled": head == "fused"})
    exact = small_model(0.1).double()
    expected, kl, rewards, good = derived(exact, small_model().double(), rows, spec.objective)
    expected.backward()
    first, model = small_model(), small_model(0.1)
    patch(first, spec.kernels)
    ours = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
    # Micro-batches of uneven shares; rows in one line are what flash attention is given.
    batches = [collate(rows[:1]), collate(rows[1:3]), collate_flat(rows[3:])]
    for batch in batches:
        batch["reference"] = ours._log_probs(first, batch)
        batch["mismatched_reference"] = ours._log_probs(first, mismatched(batch))
    items = sum(ours.count(batch) for batch in batches)
    assert int(items) == len(ROWS)
    ours.before_step(model.train(), batches, Processes())
    total = {}
    for batch in batches:
        share = ours.micro_batch_loss(model, batch, items)
        share.loss.backward()
        for key, value in {"loss": share.loss.detach(), **share.metrics}.items():
            total[key] = total.get(key, 0.0) + float(value)
    assert total["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert total["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-7) and (kl > 0) == (name == "kto")
    rewards = rewards.detach()
    assert total["reward_chosen"] == pytest.approx(float(rewards[good].mean()), rel=1e-4)
    assert total["reward_margin"] == pytest.approx(float(rewards[good].mean() - rewards[~good].mean()), rel=1e-4)
    right = torch.where(good, rewards > spec.objective.beta * kl, rewards < spec.objective.beta * kl)
    assert total["reward_accuracy"] == pytest.approx(float(right.double().mean()))
    for (parameter_name, parameter), true in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (parameter.grad - true.grad).norm() < 1e-4 * true.grad.norm(), parameter_name


def test_rows_of_one_answer_are_mismatched_with_the_row_before_and_cut_off(folder):
    data = data_of(make_spec(folder, data={"packing": False, "sequence_length": 40, "overlong": "truncate"}))
    rows = [data.train[index] for index in range(len(data.train))]
    assert len(rows) == len(ROWS)
    for before, row in pairwise([rows[-1], *rows]):
        other = {name.removeprefix("mismatched_"): row[name] for name in row if name.startswith("mismatched_")}
        prompt, _ = prompt_and_answer(row["input_ids"][row["sides"] != 0], row["labels"][row["sides"] != 0])
        real = before["sides"] != 0
        _, answer = prompt_and_answer(before["input_ids"][real], before["labels"][real])
        expected = torch.cat([prompt, answer])[:40]
        assert torch.equal(other["input_ids"][other["sides"] == 1], expected)
        assert {tensor.numel() for tensor in row.values()} == {max(expected.numel(), int((row["sides"] != 0).sum()))}


def test_the_reference_comes_with_the_row_that_it_is_of(folder, rows):
    spec = make_spec(folder)
    data, model = data_of(spec), small_model()
    ours = build_objective(spec, fused=False)
    found = score_rows(data.train, 4, lambda batch: ours.scores(model, batch), Processes(), 3, collate)
    given = data.with_reference_log_probs(train=found).train
    for index in (3, 0, 2):
        row = given[index]
        begins = begins_of(row)
        expected = [float(log_prob(model, *answer).detach()) for answer in answers_of([row])]
        assert row["reference"][begins].tolist() == pytest.approx(expected, rel=1e-5)
        assert int((row["reference"] != 0).sum()) == len(begins)
        other = {name.removeprefix("mismatched_"): row[name] for name in row if name.startswith("mismatched_")}
        expected = [float(log_prob(model, *answer).detach()) for answer in answers_of([other])]
        assert other["reference"][begins_of(other)].tolist() == pytest.approx(expected, rel=1e-5)


def test_without_its_adapter_a_model_is_the_one_it_was(folder, rows):
    spec = make_spec(folder, model={"name": "some/model"}, adapter={"type": "lora", "r": 2})
    model, batch = small_model(), collate(rows[:3])
    ours = build_objective(spec, fused=False)
    given = {**batch, "reference": ours._log_probs(model, batch)}
    given["mismatched_reference"] = ours._log_probs(model, mismatched(batch))
    add_adapter(model, spec.adapter, spec.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    shares = []
    for one in (given, batch):
        ours.before_step(model.train(), [one], Processes())
        shares.append(ours.micro_batch_loss(model, one, ours.count(one)))
    assert torch.equal(shares[0].loss, shares[1].loss) and shares[0].metrics == shares[1].metrics
    assert float(shares[0].metrics["kl"]) != 0 or float(shares[0].metrics["reward_margin"]) != 0


@pytest.mark.parametrize("size", [1, 3, 8])
def test_evaluation_does_not_depend_on_the_size_of_batches(folder, size):
    spec = make_spec(folder, data={"validation_fraction": 0.5})
    ours, first, model = build_objective(spec, fused=False), small_model(), small_model(0.1).eval()
    data = ours.prepare_validation(first, data_of(spec), spec)
    rows = [data.validation[index] for index in range(len(data.validation))]
    expected, kl, *_ = derived(model, first, rows, spec.objective)
    means = validation_means(
        model, ours, [data.validation], Processes(),
        micro_batch_size=size, max_batches=None, collate=collate,
    ).of_all  # fmt: skip
    assert means["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert means["kl"] == pytest.approx(kl, rel=1e-4) and kl > 0
    assert means["reward_margin"] == pytest.approx(means["reward_chosen"] - means["reward_rejected"], rel=1e-5)


def test_mismatched_answers_have_the_bounds_of_their_own(rows):
    single = next(row for row in rows if len(begins_of(row)) > 1)
    batch = add_cu_seqlens(collate([single]))
    other = mismatched(batch)
    lengths = [ids.numel() for ids, _ in answers_of([{**single, **{n: t[0] for n, t in other.items() if n in single}}])]
    assert other["cu_seqlens"][0].diff().tolist()[: len(lengths)] == lengths
    assert not torch.equal(other["cu_seqlens"], batch["cu_seqlens"])


def test_the_warm_up_plans_the_pass_that_estimates_the_divergence(folder, monkeypatch):
    """For every number of labels that the host may find."""
    seen, original = [], Kto._growth

    def growth(self, model, batch, max_targets):
        seen.append(max_targets)
        return original(self, model, batch, max_targets)

    monkeypatch.setattr(Kto, "_growth", growth)
    spec = make_spec(folder, training={"micro_batch_size": 8})
    assert "cross_entropy_kernel" in {item.name for item in plan_kernels(spec).specializations}
    assert set(seen) == {*row_buckets(8 * 48)} and len(set(seen)) > 2


def test_a_model_that_has_not_moved_is_indifferent(folder, rows):
    model, batch = small_model(), collate(rows)
    ours = build_objective(make_spec(folder), fused=False)
    batch["reference"] = ours._log_probs(model, batch)
    batch["mismatched_reference"] = ours._log_probs(model, mismatched(batch))
    ours.before_step(model, [batch], Processes())
    share = ours.micro_batch_loss(model, batch, ours.count(batch))
    assert float(share.loss.detach()) == pytest.approx(0.5) and math.isclose(float(share.metrics["kl"]), 0.0)
