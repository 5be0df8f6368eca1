"""Weights that other engines get against the files that transformers and PEFT write."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from strata_kernels.patch.engine import patch_model
from strata_platform.spec.sections.model import Lora
from tasks.runtime.generation.checkpoint_weights import checkpoint_weights
from tasks.runtime.models.adapters.lora import add_adapter, merge_adapter
from tests.runtime.helpers.hybrid_families import SIZES

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def build(family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"head_dim": 8} | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def written(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3_moe", EXPERTS)],
    ids=["tied", "biases", "experts"],
)
def test_they_are_those_of_a_saved_model(family, changes, dtype, tmp_path):
    model = build(family, **changes)
    patch_model(model)
    found = dict(checkpoint_weights(model, dtype))
    expected = written(model, tmp_path)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_an_adapter_is_merged_as_for_an_export(rslora, dtype, tmp_path):
    model = build("qwen2").to(dtype)
    adapted = add_adapter(model, Lora(type="lora", r=4, use_rslora=rslora), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.1 * torch.randn_like(parameter) * ("lora_" in name)
    patch_model(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = {name: weight.clone() for name, weight in checkpoint_weights(model, dtype)}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    expected = written(merge_adapter(adapted), tmp_path)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_an_adapter_on_a_shared_embedding_is_refused():
    model = build("llama", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="a tied layer is part of the adapter"):
        add_adapter(model, Lora(type="lora", target_modules=("embed_tokens",)), seed=1)
    with pytest.raises(ValueError, match=r"adapter.target_modules: the model's embedding and head share"):
        next(checkpoint_weights(model, torch.float32))
