"""A GGUF file holds the model that it was made from, as transformers and llama.cpp read it."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.export.check_folder import compare_gguf, expected_of, read_gguf, vocabulary_apart
from tasks.runtime.export.gguf_file import write_gguf
from tests.runtime.helpers.llama_cpp import LlamaCpp

# Heads that are not as wide as the hidden size, more of queries than of keys, and tied and untied embeddings.
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MODELS = {
    "llama": {"model_type": "llama", "head_dim": 32, "rope_parameters": LLAMA3},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "moe_intermediate_size": 64,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phi3-partial": {
        "model_type": "phi3", "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma2": {
        "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "num_hidden_layers": 3,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40,
        "num_hidden_layers": 7, "use_bidirectional_attention": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is 2 + 2? It is four. def f(x): return x ** 10"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Name in MODELS → a model's folder; every weight, of norms and biases too, is random."""
    made = {}
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE | fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.generation_config = GenerationConfig(eos_token_id=[2, 4])
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
        save_tokenizer(tokenizer, made[name])
    return made


def own(folder):
    """As transformers reads it: with the model of Qwen 2 it takes that family's way to divide texts."""
    return AutoTokenizer.from_pretrained(folder)


def written(folder, gguf_type):
    file = folder / f"m-{gguf_type}.gguf"
    if not file.exists():
        write_gguf(folder, file, "m", gguf_type)
    return file


def exact(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_model_and_tokenizer(folders, name):
    """Bit for bit: nothing is rounded."""
    folder = folders[name]
    model, found = read_gguf(folder, written(folder, "f32").name, torch.float32)
    ids = torch.tensor([range(2, 66)])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, exact(folder)(ids).logits)
    assert vocabulary_apart(own(folder), found) is None


@pytest.mark.parametrize("gguf_type", ["f32", "f16", "bf16", "q8_0"])
def test_every_type_is_as_close_as_it_can_be(folders, gguf_type):
    folder = folders["llama"]
    wrong, close = compare(folder, written(folder, gguf_type), gguf_type)
    assert wrong is None
    assert close.startswith("logits within ") and ("within 0 of" in close) == (gguf_type == "f32")
    if gguf_type != "f32":
        assert "differs by" in compare(folder, written(folder, gguf_type), "f32")[0]


def compare(folder, file, stored):
    """What the process that checks an export finds."""
    return compare_gguf(folder, expected_of(exact(folder), own(folder)), "cpu", file.name, stored)


def test_a_file_of_another_model_is_refused(folders):
    """32 weights of one layer are enough, where logits are still alike."""
    folder = folders["qwen3"]
    data = written(folder, "q8_0").read_bytes()
    reader = gguf.GGUFReader(folder / "m-q8_0.gguf")
    [tensor] = [tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_k.weight"]
    # A block's scale, which is its first two bytes.
    data = bytearray(data)
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(0.01).tobytes()
    (folder / "changed.gguf").write_bytes(data)
    assert compare(folder, written(folder, "q8_0"), "q8_0")[0] is None
    wrong, _ = compare(folder, folder / "changed.gguf", "q8_0")
    assert wrong.startswith("model.layers.1.self_attn.k_proj.weight differs by")


def fields_of(folder):
    return gguf.GGUFReader(written(folder, "f32")).fields


def test_the_file_says_how_to_compute_and_where_to_stop(folders, tokenizer):
    fields = fields_of(folders["llama"])
    assert {name: fields[name].contents() for name in (
        "general.architecture", "llama.context_length", "llama.attention.key_length", "llama.rope.dimension_count",
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
    )} == {
        "general.architecture": "llama", "llama.context_length": 512, "llama.attention.key_length": 32,
        "llama.rope.dimension_count": 32, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4,
    }  # fmt: skip
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    yarn = fields_of(folders["qwen2"])
    assert yarn["qwen2.rope.scaling.type"].contents() == "yarn"
    assert yarn["qwen2.rope.scaling.factor"].contents() == 4
    assert yarn["qwen2.rope.scaling.original_context_length"].contents() == 128


def test_frequencies_of_llama3_are_those_of_the_model(folders):
    """transformers reads them from no file."""
    config = AutoConfig.from_pretrained(folders["llama"])
    reader = gguf.GGUFReader(written(folders["llama"], "f32"))
    [factors] = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    scaled = LlamaRotaryEmbedding(config).inv_freq
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    torch.testing.assert_close(LlamaRotaryEmbedding(config).inv_freq / torch.from_numpy(np.array(factors)), scaled)
    assert factors.max() == 8 and factors.min() == 1


def test_a_weight_beyond_float16_is_told(folders, tmp_path, tokenizer):
    model = exact(folders["qwen3"])
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] = 7e4
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"export\.gguf_type: .*up_proj\.weight has a value of 7e\+04.*to 'bf16'"):
        write_gguf(tmp_path, tmp_path / "m.gguf", "m", "f16")


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(folders, name):
    """Its own arithmetic rounds keys and values to float16. The text is longer than windows and original lengths."""
    folder = folders[name]
    model = LlamaCpp(written(folder, "f32"))
    text = "What is 2 + 2?  It's four.\n\ndef f(x):\n    return x ** 10  # naïve café 漢字\n" * 3
    ids = own(folder)(text)["input_ids"][:200]
    assert model.tokens(text)[:200] == ids
    with torch.inference_mode():
        wanted = exact(folder)(torch.tensor([ids])).logits[0]
    found = model.logits(ids)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-2
    assert float((found.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.95
