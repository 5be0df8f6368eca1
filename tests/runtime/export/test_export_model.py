"""The exported folder appears whole, and a killed export leaves nothing that stays."""

import re
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, Gemma3Config, GenerationConfig, LlamaConfig

from strata_platform.spec import RunSpec
from tasks.runtime.data.preparation.tokenizer import train_tokenizer
from tasks.runtime.export import export_model
from tasks.runtime.export.export_model import _replace, _stop_at, model_card
from tasks.runtime.export.publish import RECORD as RECORD_FILE
from tasks.runtime.export.publish import _require_exported
from tasks.runtime.models.config import load_config
from tests.runtime.helpers.audio_models import qwen2_audio
from tests.runtime.helpers.vision_models import qwen2_5_vl
from tests.runtime.report.test_report import RECORD


def test_the_new_folder_takes_the_place_and_leftovers_go(tmp_path):
    new, old, left = (tmp_path / name for name in (".model.tmp", "model", ".model.old"))
    for folder in (new, old, left):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    _replace(new, old)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (old / "config.json").read_text() == ".model.tmp"


@pytest.mark.parametrize(
    ("makers", "learned", "ends"),
    [(2, (2, 4), [2, 4]), ([5, 2], (4,), [2, 4, 5]), (2, (2,), 2), (None, (), None), (None, (4,), 4)],
)
def test_what_the_model_writes_ends_where_it_learned_to(makers, learned, ends):
    config = GenerationConfig(eos_token_id=makers)
    _stop_at(config, learned)
    assert config.eos_token_id == ends


def test_the_card_does_not_say_what_opens_the_data():
    spec = RunSpec.model_validate({"data": {"source": "https://host/rows.jsonl?X-Signature=hidden"}})
    assert "on `https://host/rows.jsonl?...`" in model_card(spec, RECORD, LlamaConfig())


@pytest.mark.parametrize(
    ("family", "task"), [(qwen2_5_vl, "image-text-to-text"), (qwen2_audio, "audio-text-to-text")], ids=["sees", "hears"]
)
def test_a_model_with_other_input_than_text_is_loaded_as_its_card_says(family, task, tmp_path):
    folder = family(tmp_path / "model", hidden=32)
    spec = RunSpec.model_validate({"model": {"name": str(folder)}})
    card = model_card(spec, RECORD, load_config(spec.model))
    assert ModelCard(card).data.pipeline_tag == task
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    found = {}
    exec(code.replace("path/to/this/folder", str(folder)), found)
    assert found["model"].config.model_type == family.__name__
    assert type(found["processor"]).__name__.endswith("Processor")


def test_the_card_names_no_folder_of_the_machine(tmp_path):
    spec = RunSpec.model_validate(
        {"model": {"name": str(tmp_path)}, "data": {"source": [f"{tmp_path}/a.jsonl", "b/c"]}}
    )
    card = model_card(spec, RECORD, LlamaConfig())
    assert f"fine-tuned from `{tmp_path.name}` on `a.jsonl, b/c`" in card
    assert str(tmp_path) not in card and "base_model" not in card and "license" not in card


def test_the_card_of_a_model_from_scratch_names_its_configuration_and_no_licence(tmp_path):
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path), "init": "random"}, "data": {"source": "b/c"}})
    card = model_card(spec, RECORD, LlamaConfig())
    assert f"trained from scratch, with the configuration of `{tmp_path.name}` on `b/c`" in card
    assert "base_model" not in card and "license" not in card


def test_the_card_says_what_the_model_was_made_from_and_its_licence(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: theirs\nlicense_link: LICENSE\ntags: [x]\n---\n# A model\n"
    )
    asked = []
    monkeypatch.setattr(
        export_model, "hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path / "README.md")
    )
    spec = RunSpec.model_validate({"model": {"name": "org/base", "revision": "abc"}, "adapter": {"type": "lora"}})
    card = model_card(spec, RECORD, LlamaConfig())
    assert asked == [(("org/base", "README.md"), {"revision": "abc"})]
    assert "fine-tuned from `org/base` at `abc` by LoRA of rank" in card
    assert ModelCard(card).data.to_dict() == {
        "base_model": "org/base",
        "library_name": "transformers",
        "license": "other",
        "license_name": "theirs",
        "license_link": "https://huggingface.co/org/base/blob/main/LICENSE",
        "pipeline_tag": "text-generation",
        "tags": ["strata", "sft"],
    }
    monkeypatch.setattr(export_model, "hf_hub_download", lambda *a, **k: (tmp_path / "none").read_text())
    assert ModelCard(model_card(spec, RECORD, LlamaConfig())).data.to_dict().keys() == {
        "base_model",
        "library_name",
        "pipeline_tag",
        "tags",
    }


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
TEXT = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 4096}


@pytest.mark.parametrize(
    ("config", "has", "kept", "warnings"),
    [
        (LlamaConfig(**TEXT), True, False, 0),
        (Gemma3Config(text_config=TEXT, vision_config={**SMALL, "image_size": 28}), True, True, 0),
        (Gemma3Config(text_config=TEXT, vision_config={**SMALL, "image_size": 28}), False, False, 1),
    ],
    ids=["reads", "sees", "sees by nobody knows what"],
)
def test_a_model_that_sees_comes_with_what_it_sees_by(tmp_path, monkeypatch, caplog, config, has, kept, warnings):
    (tmp_path / "base").mkdir()
    if has:
        (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    monkeypatch.setattr(export_model, "build_trained_model", lambda *_: AutoModelForCausalLM.from_config(config))
    monkeypatch.setattr(export_model, "verify", lambda *arguments, **options: None)
    manifest = SimpleNamespace(stop_token_ids=(2,), has_media=False)
    data = SimpleNamespace(tokenizer=lambda: train_tokenizer(["text"]), manifest=manifest)
    export_model.write_model(RunSpec(model={"name": str(tmp_path / "base")}), data, tmp_path, tmp_path / "model")
    names = [path.name for path in (tmp_path / "model").iterdir()]
    assert ("preprocessor_config.json" in names) == kept
    assert [record.levelname for record in caplog.records if record.name == export_model.log.name] == [
        "WARNING"
    ] * warnings
    # Else the next export would be refused.
    _require_exported("address", [*names, RECORD_FILE])
