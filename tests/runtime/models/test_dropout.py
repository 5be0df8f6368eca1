"""Dropout is off where answers are compared, of the model and of its adapter, and on elsewhere."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, OPTConfig, OPTForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.dropout import turn_dropout_off
from tasks.runtime.objectives.training_step import build_training_step

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("objective", "off"), [("sft", False), ("dpo", True), ("kto", True), ("simpo", True), ("reward", True)]
)
def test_objectives_that_compare_answers_have_none(objective, off, tmp_path):
    config = LlamaConfig(**SMALL, intermediate_size=64, attention_dropout=0.5)
    config.save_pretrained(tmp_path)
    spec = RunSpec.model_validate(
        {
            "model": {"name": str(tmp_path)},
            "data": {"source": "pairs.jsonl"},
            "objective": {"type": objective},
            "adapter": {"type": "lora", "lora_dropout": 0.5},
        }
    )
    kind = LlamaForSequenceClassification if objective == "reward" else LlamaForCausalLM
    model = kind(config)
    add_adapter(model, spec.adapter, spec.seed)
    step = build_training_step(model, spec, torch.device("cpu"))
    assert step.dropout_off is off
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    rates |= {layer.self_attn.attention_dropout for layer in model.model.layers}
    assert rates == {0.0 if off else 0.5}
    assert model.config.attention_dropout == 0.5


def test_rates_that_modules_pass_to_functions_are_turned_off():
    """As OPT's, which TRL's function of this kind leaves on."""
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5)).train()
    ids = torch.arange(24)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    assert turn_dropout_off(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert not turn_dropout_off(model)
