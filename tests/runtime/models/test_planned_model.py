"""What is refused by the configuration alone, before data are prepared."""

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.planned_model import require_kernels, require_names_of_weights

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "num_key_value_heads": 2,
}


@pytest.fixture
def model(tmp_path):
    """A model of a type whose folder has a configuration and no weights yet."""

    def model(model_type, **fields):
        sizes = SMALL if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else {}
        AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path / model_type)
        return Model(name=str(tmp_path / model_type), **fields)

    return model


def test_kernels_that_cannot_all_be_put_in_place(model):
    """Nemotron's norm adds one to its weight."""
    with pytest.raises(ValueError, match=r"kernels\.enabled is true, but layer_norm: .* Set it to auto"):
        require_kernels(model("nemotron"), Kernels(enabled=True))
    require_kernels(model("nemotron"), Kernels(enabled=True, exclude=["layer_norm"]))
    require_kernels(model("nemotron"), Kernels(enabled="auto"))
    require_kernels(model("starcoder2"), Kernels(enabled=True))


def test_a_loss_of_the_models_own(model):
    """BART's decoder computes its loss itself, without the number of tokens in a step."""
    with pytest.raises(ValueError, match=r"model\.name: .* computes its loss with its own code"):
        require_kernels(model("bart"), Kernels(enabled="auto"))


def test_names_of_weights(model):
    with pytest.raises(ValueError, match=r"model\.freeze: 'embed_token' matches no .* did you mean 'embed_tokens'"):
        require_names_of_weights(model("llama", freeze=["embed_token"]))
    with pytest.raises(ValueError, match="leaves no weight to train"):
        require_names_of_weights(model("llama", freeze=["*"]))
    require_names_of_weights(model("llama", trainable=["layers.0"]))


@pytest.mark.parametrize("model_type", ["clip", "granite_speech"])
def test_a_model_of_another_kind(model, model_type):
    """transformers lists the two hundred kinds that it knows."""
    with pytest.raises(
        ValueError, match=r"AutoModelForCausalLM of transformers has no model with a \w+Config; choose"
    ) as told:
        require_kernels(model(model_type), Kernels())
    assert len(str(told.value)) < 500
