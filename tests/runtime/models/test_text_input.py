"""Models that cannot learn to continue a text are rejected by their configuration."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PhiForCausalLM

from strata_platform.spec.sections.model import Model
from tasks.runtime.models.text_input import require_text_input

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
}


def model_of(folder, model_type, **fields):
    """A model of a type whose folder has a configuration and no weights."""
    CONFIG_MAPPING[model_type](**fields).save_pretrained(folder)
    return Model(name=str(folder))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("blip-2", r"Blip2ForConditionalGeneration needs pixel_values beside a text; choose"),
        ("instructblip", r"needs pixel_values, qformer_input_ids beside a text"),
        ("pix2struct", r"Pix2StructForConditionalGeneration takes no input_ids"),
        ("t5gemma2", r"T5Gemma2ForConditionalGeneration is an encoder with a decoder"),
        ("florence2", r"is an encoder with a decoder"),
        ("pp_formulanet", r"is an encoder with a decoder"),
        ("vision-encoder-decoder", r"takes no input_ids"),
        ("musicgen", r"musicgen has several text parts \(text_encoder, decoder\)"),
    ],
)
def test_what_reads_no_text_alone_is_rejected(tmp_path, model_type, message):
    fields = {}
    if model_type == "vision-encoder-decoder":
        parts = {"encoder": "vit", "decoder": "gpt2"}
        fields = {name: CONFIG_MAPPING[part]().to_dict() for name, part in parts.items()}
    if model_type == "musicgen":
        parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
        fields = {name: CONFIG_MAPPING[part]().to_dict() for name, part in parts.items()}
    with pytest.raises(ValueError, match=rf"model\.name .*{message}"):
        require_text_input(model_of(tmp_path, model_type, **fields))


def reads_ahead(config):
    """Whether another last token changes what the first ones predict, by transformers alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    one, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        return not torch.allclose(model(input_ids=one).logits[:, :3], model(input_ids=other).logits[:, :3], atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bert", {}),
        ("bert", {"is_decoder": True}),
        ("roberta", {}),
        ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 8}),
        ("gemma3_text", {"head_dim": 8}),
        ("llama", {}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
)
def test_a_model_that_reads_what_it_is_to_predict_is_rejected(tmp_path, model_type, fields):
    """Its loss falls to 0, and it learns nothing."""
    model = model_of(tmp_path, model_type, **SMALL, **fields)
    if not reads_ahead(AutoConfig.from_pretrained(tmp_path)):
        require_text_input(model)
        return
    decoder = "or set is_decoder to true in its config.json" if model_type in ("bert", "roberta") else "choose"
    with pytest.raises(ValueError, match=rf"model\.name .*attends to the tokens that it is to predict.*{decoder}"):
        require_text_input(model)


@pytest.mark.parametrize("model_type", ["gpt2", "mamba", "gemma3", "qwen2_vl", "mllama", "bart", "moshi", "mixtral"])
def test_a_model_that_continues_texts_is_not(tmp_path, model_type):
    require_text_input(model_of(tmp_path, model_type))


@pytest.mark.parametrize("found", [None, "lm_head"])
def test_a_model_that_does_not_embed_its_tokens_is_rejected(tmp_path, monkeypatch, found):
    """As code that a model brings, which names no embedding or another module."""

    def get_input_embeddings(self):
        if found is None:
            raise NotImplementedError
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(PhiForCausalLM, "get_input_embeddings", get_input_embeddings)
    with pytest.raises(ValueError, match=r"model\.name: PhiForCausalLM does not embed input_ids.*choose a causal"):
        require_text_input(model_of(tmp_path, "phi", **SMALL))
