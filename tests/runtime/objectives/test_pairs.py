"""ORPO, SimPO and CPO: the losses against a plain derivation in fp64, whatever the packing, micro-batches and head."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.objectives import Cpo, Orpo, Simpo
from tasks.runtime.data import collate, collate_flat
from tasks.runtime.models.build import has_fused_loss, patch
from tasks.runtime.objectives import build_objective
from tasks.runtime.objectives.pairs import Pairs
from tests.runtime.helpers.preference_pairs import PAIRS as ALL
from tests.runtime.helpers.preference_pairs import write_pairs
from tests.runtime.helpers.small_answers import answers_of, data_of, log_prob, small_model

# Among them answers of one token, and its end.
PAIRS = [{**pair, "chosen": "a"} if number % 3 == 0 else pair for number, pair in enumerate(ALL[:10])]
OBJECTIVES = {
    "orpo": {"type": "orpo", "beta": 0.4},
    "simpo": {"type": "simpo", "gamma": 0.7, "label_smoothing": 0.1},
    "cpo": {"type": "cpo", "beta": 0.2, "alpha": 0.5},
}


def make_spec(folder, objective, **changes):
    data = {"source": str(folder / "pairs.jsonl"), "sequence_length": 96, "validation_fraction": 0}
    return RunSpec.model_validate({"output": str(folder / "out"), "data": data, "objective": objective, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "pairs.jsonl", PAIRS)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """Packed rows, of several pairs each."""
    train = data_of(make_spec(folder, {"type": "cpo"})).train
    assert 3 < len(train) < len(PAIRS)
    return [train[index] for index in range(len(train))]


def smooth(z, smoothing):
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def derived(model, rows, settings):
    """Loss and accuracy as the papers have them, answer by answer."""
    answers = answers_of(rows)
    sums = torch.stack([log_prob(model, ids, labels) for ids, labels in answers])
    tokens = torch.tensor([int((labels != -100).sum()) for _, labels in answers])
    means = sums / tokens
    chosen, rejected = means[::2], means[1::2]
    if isinstance(settings, Orpo):
        odds = [torch.log(mean.exp() / (1 - mean.exp())) for mean in (chosen, rejected)]
        losses = -chosen - settings.beta * logsigmoid(odds[0] - odds[1])
    elif isinstance(settings, Simpo):
        losses = smooth(settings.beta * (chosen - rejected) - settings.gamma, settings.label_smoothing)
    else:
        assert isinstance(settings, Cpo)
        losses = smooth(settings.beta * (sums[::2] - sums[1::2]), settings.label_smoothing) - settings.alpha * chosen
    return losses.mean()


@pytest.mark.parametrize("head", ["fused", "plain"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_those_of_the_papers(folder, rows, name, head):
    spec = make_spec(folder, OBJECTIVES[name], kernels={"enabled": head == "fused"})
    exact = small_model(0.1).double()
    expected = derived(exact, rows, spec.objective)
    expected.backward()
    model = small_model(0.1)
    ours = build_objective(spec, fused=has_fused_loss(patch(model, spec.kernels)))
    items = sum(ours.count(collate([row])) for row in rows)
    assert int(items) == len(PAIRS)
    total = {}
    # Micro-batches of uneven shares; rows in one line are what flash attention is given.
    for batch in (collate(rows[:1]), collate(rows[1:3]), collate_flat(rows[3:])):
        share = ours.micro_batch_loss(model.train(), batch, items)
        share.loss.backward()
        for key, value in {"loss": share.loss.detach(), **share.metrics}.items():
            total[key] = total.get(key, 0.0) + float(value)
    assert total["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert total["reward_margin"] == pytest.approx(total["reward_chosen"] - total["reward_rejected"], abs=1e-5)
    for (parameter_name, parameter), true in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (parameter.grad - true.grad).norm() < 1e-4 * true.grad.norm(), parameter_name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_equal_rewards_are_no_preference(folder, name):
    objective = build_objective(make_spec(folder, OBJECTIVES[name]), fused=False)
    values, ones = torch.tensor([-3.0, -2.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    chosen, rejected = objective.rewards(Pairs(values, values, 2 * ones, 2 * ones))
    assert torch.equal(chosen, rejected)
