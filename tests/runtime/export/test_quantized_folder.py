"""FP8 and int4 folders hold the model that they were made from, as transformers reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.export.check_folder import compare_quantized, expected_of
from tasks.runtime.export.quantized_folder import SCHEMES, group_size, linear_layers, write_quantized

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE, **MODELS[request.param]))
    model.generation_config.eos_token_id = [2, 4]
    made = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(made)
    save_tokenizer(train_tokenizer(["What is 2 + 2? It is four."]), made)
    for form in SCHEMES:
        write_quantized(made, made / form, form)
    return made


def compare(folder, form):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    return compare_quantized(folder, expected_of(model, tokenizer), "cpu", form)


@pytest.mark.parametrize("form", SCHEMES)
def test_the_folder_holds_the_model(folder, form):
    wrong, close = compare(folder, form)
    assert wrong is None and close.startswith("logits within 0.")
    config = json.loads((folder / form / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    [group] = config["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == {"fp8": (8, None), "int4": (4, 32)}[form]
    template = AutoTokenizer.from_pretrained(folder / form).chat_template
    assert template == AutoTokenizer.from_pretrained(folder).chat_template is not None
    assert json.loads((folder / form / "generation_config.json").read_text())["eos_token_id"] == [2, 4]
    # Embeddings, norms and the head as they are; a byte or half a byte for each other weight, and scales.
    stored = load_file(folder / form / "model.safetensors")
    exact = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], exact[name]) for name in exact if name in stored and exact[name].ndim == 1)
    assert torch.equal(stored["model.embed_tokens.weight"], exact["model.embed_tokens.weight"])
    packed = "weight" if form == "fp8" else "weight_packed"
    layer = stored[f"model.layers.0.mlp.down_proj.{packed}"]
    assert layer.numel() * layer.element_size() == 64 * 96 // (1 if form == "fp8" else 2)


@pytest.mark.parametrize("form", SCHEMES)
def test_a_folder_that_was_changed_is_refused(folder, form):
    """One scale of one layer."""
    file = folder / form / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    changed = tensors[name].clone()
    changed[0] *= 2
    save_file({**tensors, name: changed}, file, metadata={"format": "pt"})
    try:
        wrong, _ = compare(folder, form)
        assert wrong.startswith("model.layers.1.self_attn.k_proj.weight differs by")
    finally:
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("width", "size"), [(256, 128), (192, 64), (96, 32)])
def test_the_group_divides_all_rows(width, size):
    config = AutoConfig.for_model("llama", **{**SHAPE, "hidden_size": width, "intermediate_size": 384})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(linear_layers(model)) == 2 * 7 and group_size(model) == size


def test_rows_without_groups_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SHAPE, "intermediate_size": 100}))
    with pytest.raises(ValueError, match="rows of its linear layers are multiples of 4, and int4 needs those of 32"):
        group_size(model)
