"""An engine with other weights is noticed."""

import pytest
import torch

from tasks.runtime.generation import Request, Sampling
from tasks.runtime.generation.compare import require_same_log_probs
from tests.runtime.generation.test_embedded import build, generator

REQUEST = Request((5, 6, 7), 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rounding_is_no_difference_and_other_weights_are_one(temperature):
    model = build()
    sampling = Sampling(max_new_tokens=20, temperature=temperature)
    (sample,) = generator(model).generate([REQUEST], sampling)
    require_same_log_probs(model, REQUEST, sample, temperature, torch.float32)
    assert model.training
    near = sample._replace(log_probs=sample.log_probs + 0.1)
    require_same_log_probs(model, REQUEST, near, temperature, torch.bfloat16)
    with pytest.raises(ValueError, match=r"log-probabilities are 0\.1 away .* more than the 0\.01"):
        require_same_log_probs(model, REQUEST, near, temperature, torch.float32)
    broken = sample._replace(log_probs=sample.log_probs * torch.nan)
    with pytest.raises(ValueError, match="are nan away"):
        require_same_log_probs(model, REQUEST, broken, temperature, torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    with pytest.raises(ValueError, match="model_type 'llama' differently, or lacks weights"):
        require_same_log_probs(model, REQUEST, sample, temperature, torch.float32)
