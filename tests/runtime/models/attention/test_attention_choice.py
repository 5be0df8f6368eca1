"""Which attention a model gets, and that a model without sdpa trains by default."""

import logging

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma2Config, GemmaConfig, PaliGemmaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from strata_platform.spec.sections.model import Model
from tasks.runtime.models.attention.attention_choice import choose_attention
from tasks.runtime.models.build import build_model, build_model_on_meta, build_planning_model
from tasks.runtime.models.config import require_attention
from tests.kernels.test_patch import SIZES

AUTO = {"llama": "sdpa", "gpt_oss": "eager", "gemma2": "eager", "gemma3_text": "sdpa"}


def save(folder, model_type):
    config = CONFIG_MAPPING[model_type](**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Model(name=str(folder))


@pytest.mark.parametrize("model_type", AUTO)
def test_auto_is_what_transformers_takes_by_itself(model_type):
    config = CONFIG_MAPPING[model_type](**SIZES)
    assert choose_attention("auto", config) == AUTO[model_type]
    made = AutoModelForCausalLM.from_config(config)
    # transformers 5.17 takes sdpa for Gemma 2, without the cap of its scores.
    if not (model_type == "gemma2" and made._supports_sdpa):
        assert made.config._attn_implementation == AUTO[model_type]


@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_scores_are_capped_where_the_class_says_that_it_has_sdpa(tmp_path, monkeypatch, attention):
    """As Gemma 2 says in transformers 5.17. The reference is the family's own eager attention."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    config = Gemma2Config(**SIZES, attn_logit_softcapping=0.01, query_pre_attn_scalar=1)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    tokens = torch.arange(12)[None]
    built = build_model(Model(name=str(tmp_path), attention=attention), 0).eval()
    torch.testing.assert_close(built(tokens).logits, reference(tokens).logits)
    with pytest.raises(ValueError, match="'sdpa': Gemma2ForCausalLM does not support it"):
        require_attention(Model(name=str(tmp_path), attention="sdpa"))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_every_way_to_build_a_model_takes_the_same_attention(tmp_path, model_type):
    model = save(tmp_path, model_type)
    built = build_model(model, 0), build_model_on_meta(model), build_planning_model(model, torch.float32)
    assert {made.config._attn_implementation for made in built} == {AUTO[model_type]}


def test_a_vision_language_model_takes_what_its_language_model_has(tmp_path):
    """transformers says that PaliGemma has sdpa, and then that its Gemma 2 has not."""
    assert choose_attention("auto", PaliGemmaConfig(text_config=Gemma2Config())) == "eager"
    assert choose_attention("auto", PaliGemmaConfig(text_config=GemmaConfig())) == "sdpa"


def test_attention_that_the_class_lacks_is_refused_with_the_way_out(tmp_path):
    model = save(tmp_path, "gpt_oss")
    asked = model.model_copy(update={"attention": "sdpa"})
    with pytest.raises(ValueError, match=r"model\.attention 'sdpa': GptOssForCausalLM.*set model\.attention to 'auto'"):
        require_attention(asked)
    # It has flash attention by other packages than this one, which transformers would take without a word to us.
    flash = model.model_copy(update={"attention": "flash_attention_2"})
    with pytest.raises(
        ValueError, match=r"'flash_attention_2': GptOssForCausalLM does not.*another kernel from the Hub"
    ):
        require_attention(flash)
    require_attention(model.model_copy(update={"attention": "eager"}))


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("llama", None),
        ("gemma2", "with flash_attention_2 installed, set model.attention to it"),
        ("gpt_oss", "training in bfloat16 on a GPU uses varlen attention, anything else"),
        ("deepseek_v4", "so attention runs eager"),
        ("mamba", None),
    ],
)
def test_the_cost_of_a_missing_sdpa_is_logged(tmp_path, caplog, model_type, told):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        require_attention(Model(name=str(tmp_path)))
    assert ("runs eager, which keeps the scores" in caplog.text) == (told is not None) and (told or "") in caplog.text
