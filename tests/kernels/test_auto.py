"""strata_kernels.auto: loading a model that is patched."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from strata_kernels import unpatch_model
from strata_kernels.auto import AutoModelForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


def test_from_config_and_from_pretrained(tmp_path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, exclude=["rope"])
    tokens = torch.arange(8)[None]
    assert all(m.train()(tokens, labels=tokens).logits is None for m in (model, loaded))
    unpatch_model(loaded)
    assert type(loaded) is LlamaForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_loading_info(tmp_path) -> None:
    """As in transformers, it comes beside the model."""
    LlamaForCausalLM(AutoConfig.for_model("llama", **SIZES)).save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is not LlamaForCausalLM and isinstance(model, LlamaForCausalLM)
    assert info == LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1]


def test_family_without_a_row() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=20)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model.transformer.ln_f) is not torch.nn.LayerNorm
    with pytest.raises(ValueError, match="unknown operator 'norm'"):
        AutoModelForCausalLM.from_config(config, exclude=["norm"])


def test_without_transformers() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import strata_kernels
try:
    import strata_kernels.auto
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'transformers>=5.17,<5.25'" in done.stdout
