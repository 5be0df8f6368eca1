"""An evaluation leaves no trace in what is trained."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from strata_platform.spec.run_spec import Evaluation
from tasks.runtime.evaluation.during_training import require_validation_rows, undisturbed
from tasks.runtime.process.rng import random_states


class Model(nn.Module):
    """Draws random numbers, counts, and averages what it sees, also where it is only evaluated."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.frozen = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.config = SimpleNamespace(get_text_config=lambda: self.text)
        self.text = SimpleNamespace(output_router_logits=True)

    def forward(self, x):
        self.passes += 1
        random.random(), np.random.rand(), torch.rand(1)
        return self.dropout(self.norm(x))


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_what_an_evaluation_changes_is_changed_back(error):
    model, x = Model(), torch.randn(8, 4)
    model.train()
    model.frozen.eval()
    model(x)
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = random_states()
    try:
        with undisturbed(model, model):
            assert torch.equal(model(x), model(x)), "dropout is on"
            assert not model(x).requires_grad and not model.text.output_router_logits
            model.norm.running_mean.zero_()
            if error:
                raise error
    except RuntimeError:
        assert error
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    after = random_states()
    assert all(torch.equal(after[name], numbers[name]) or name == "gauss" for name in numbers)
    assert model.text.output_router_logits


def test_data_without_validation_rows_is_refused_before_training():
    data = SimpleNamespace(manifest=SimpleNamespace(validation=SimpleNamespace(target_tokens=0)))
    with pytest.raises(ValueError, match=r"evaluation\.every needs validation rows.*data\.validation_fraction"):
        require_validation_rows(Evaluation(every=5), data)
    with pytest.raises(ValueError, match=r"evaluation\.per_epoch needs .* or leave evaluation\.per_epoch out"):
        require_validation_rows(Evaluation(per_epoch=1), data)
    require_validation_rows(Evaluation(), data)
