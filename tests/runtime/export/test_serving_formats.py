"""Formats that a model cannot have are refused before it is trained."""

import json
import re

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.export import Export
from strata_platform.spec.sections.model import Lora, Model, NoAdapter
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.export import serving_formats
from tasks.runtime.export.serving_formats import require_formats

LLAMA = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip
GGUF = Export(formats=("safetensors", "gguf"))


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(train_tokenizer(["2 + 2 = 4"]), tmp_path)
    return tmp_path


def require(folder, **config):
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    require_formats(GGUF, Model(name=str(folder)), Data(), NoAdapter())


def test_what_llama_cpp_has_is_accepted(folder):
    require(folder)
    require_formats(GGUF, Model(), Data(), NoAdapter())
    require_formats(Export(), Model(name="org/any"), Data(), NoAdapter())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not one of the families that can be written as GGUF"),
        ({"hidden_act": "gelu"}, "llama.cpp has no llama with hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'; it"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 16.0,
                              "original_max_position_embeddings": 64}}, "beta_fast 16.0 in rope_parameters"),
        ({"model_type": "qwen3", "attention_bias": True}, "llama.cpp has no qwen3 with attention_bias True"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "llama.cpp has no qwen3_moe with norm_topk_prob False"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ({"model_type": "phi3", "pad_token_id": 0, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0],
            "original_max_position_embeddings": 64}}, "rope_type 'longrope'; it has default"),
        ({"model_type": "gemma2", "head_dim": 4}, "query_pre_attn_scalar 256, where it computes with 4"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "attn_logit_softcapping None"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types other than full_attention in"),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, "tie_word_embeddings False"),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(folder, config, said):
    with pytest.raises(ValueError, match=rf"^export\.formats 'gguf': model\.name .*{re.escape(said)}.*leave 'gguf'"):
        require(folder, **config)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (
            Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
            "its tokenizer is WordLevel, not byte-level BPE or SentencePiece's",
        ),
        (Tokenizer(models.BPE({"a": 0}, [], byte_fallback=True)), "its tokenizer has no token for the byte <0x00>"),
        (Tokenizer(models.BPE({"a": 0}, [])), "no name for the way in which its tokenizer divides texts"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(folder, tokenizer, said):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="a").save_pretrained(folder)
    with pytest.raises(ValueError, match=rf"^export\.formats 'gguf': .*{said}"):
        require(folder)


def test_an_adapter_that_unties_a_head_is_refused_where_llama_cpp_ties_it(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma3_text", "query_pre_attn_scalar": 256}))
    model = Model(name=str(folder))
    require_formats(GGUF, model, Data(), Lora())
    require_formats(GGUF, model, Data(), Lora(target_modules=r".*\.q_proj"))
    for targets in (("q_proj", "embed_tokens"), r".*\.(q_proj|embed_tokens)"):
        with pytest.raises(ValueError, match=r"llama\.cpp has no gemma3_text with tie_word_embeddings False"):
            require_formats(GGUF, model, Data(), Lora(target_modules=targets))


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(serving_formats, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'gguf' needs the package gguf.*install strata\[gguf\], or leave 'gguf' out"):
        require_formats(GGUF, Model(), Data(), NoAdapter())


def test_rows_that_int4_cannot_divide_are_refused(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ValueError, match=r"^export\.formats 'int4': model\.name .*multiples of 8, and int4 needs"):
        require_formats(Export(formats=("int4",)), Model(name=str(folder)), Data(), NoAdapter())


@pytest.mark.parametrize("form", ["gguf", "fp8", "int4"])
def test_a_model_that_is_quantized_already_is_refused(folder, form):
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantized}))
    with pytest.raises(ValueError, match=rf"^export\.formats '{form}' is made from exact weights.*leave '{form}' out"):
        require_formats(Export(formats=(form,)), Model(name=str(folder)), Data(), NoAdapter())
