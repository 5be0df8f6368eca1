"""The copy of a model that generates where the weights of the trained one are sharded."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strata_platform.spec.sections.training import Training
from tasks.runtime.models.activations.activation_checkpointing import checkpoint_activations, compile_layers
from tasks.runtime.parallel.whole_model import WholeCopy


@pytest.mark.parametrize(
    "settings",
    [{"gradient_checkpointing": "full"}, {"gradient_checkpointing": "attention"}, {"compile": True}],
    ids=["full", "attention", "compiled"],
)
def test_its_layers_are_its_own_however_the_model_computes(settings):
    """Recomputation and `torch.compile` replace the forward passes of the layers of the trained model."""
    config = AutoConfig.for_model(
        "llama", vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(40, (1, 9))
    with torch.no_grad():
        expected = model(ids).logits
        training = Training(**settings)
        checkpoint_activations(model, training)
        compile_layers(model, training)
        whole = WholeCopy(model, torch.device("cpu"), None, lambda parameter: parameter.detach().clone())
        whole.update()
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(whole.model(ids).logits, expected)
