"""Adapters are read and written as PEFT does, modules that are trained whole included."""

import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Lora
from tasks.runtime.export.adapter_export import read_adapter
from tasks.runtime.models.adapters.adapter_folder import CONFIG, load_initial_adapter, write_adapter
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model
from tasks.runtime.optim.optimizer import build_optimizer
from tests.runtime.helpers.vision_models import FAMILIES

# What get_peft_model and loading into a tied model say.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")
TOKENS = torch.arange(5, 37)[None]
TIED = {True: "tied", False: "untied"}


@pytest.fixture(scope="module", params=TIED, ids=TIED.get)
def folder(request, tmp_path_factory):
    """A model of others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=request.param,
    )  # fmt: skip
    path = tmp_path_factory.mktemp(TIED[request.param])
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def spec_of(folder, **adapter):
    adapter = {"type": "lora", "r": 4, **adapter}
    return RunSpec.model_validate({"model": {"name": str(folder), "dtype": "float32"}, "adapter": adapter})


def adapted(spec, seed=0):
    model = build_model(spec.model, seed)
    add_adapter(model, spec.adapter, seed)
    return model


def trained(spec):
    """A model whose weights that learn are not those it began with."""
    model = adapted(spec)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"use_dora": True, "target_modules": ["q_proj", "mlp.down_proj"]},
        {"use_rslora": True, "modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "norm"], "target_modules": ["v_proj"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"target_modules": r"model\.layers\.1\..*_proj|.*\.v_proj"},
    ],
    ids=["all", "dora", "embedding", "head-and-norm", "embedding-adapter", "embedding-adapter-dora", "regex"],
)
def test_peft_reads_what_was_trained(folder, adapter, tmp_path):
    spec = spec_of(folder, **adapter)
    model = trained(spec)
    write_adapter(model, spec.adapter, spec.model, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base)
    theirs = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(model) - before).abs().max() > 0.01
    # And a run starts from it.
    again = adapted(spec, seed=5)
    start = spec.adapter.model_copy(update={"init_from": str(tmp_path)})
    load_initial_adapter(again, start, spec.model)
    assert torch.equal(logits(again), logits(model))
    # Where the model was is nothing to others.
    assert str(folder) not in (tmp_path / CONFIG).read_text()


def test_an_export_is_compared_in_the_type_that_it_was_trained_in(folder, tmp_path):
    """PEFT's default is float32, which rounds otherwise, and may send a token to another expert."""
    spec = spec_of(folder)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "bfloat16"})})
    model = trained(spec)
    write_adapter(model, spec.adapter, spec.model, tmp_path)
    assert torch.equal(logits(read_adapter(tmp_path, build_model(spec.model, 0))), logits(model))


@pytest.mark.parametrize(("family", "tower"), [("llava", "q_proj"), ("gemma4", "linear")])
def test_peft_adapts_the_layers_of_a_vision_language_model_that_we_did(family, tower, tmp_path):
    """Without a name for the tower, none of its layers, although some have the names of those in the language model."""
    base = FAMILIES[family](tmp_path / "base")
    for number, names in enumerate(((), ("q_proj",), r"model\.language_model\..*\.q_proj", ("q_proj", tower))):
        spec = spec_of(base, target_modules=names)
        model = trained(spec)
        write_adapter(model, spec.adapter, spec.model, tmp_path / str(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            theirs = PeftModel.from_pretrained(
                AutoModelForImageTextToText.from_pretrained(base), tmp_path / str(number)
            )
        torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
        adapted_layers = [name for name, _ in model.named_parameters() if "lora_B" in name]
        assert adapted_layers == [
            name.removeprefix("base_model.model.") for name, _ in theirs.named_parameters() if "lora_B" in name
        ]
        # LLaVA's tower has a `q_proj` of its own; Gemma 4's has modules around its layers.
        assert any("vision" in name for name in adapted_layers) == (isinstance(names, tuple) and tower in names)


def test_a_run_starts_from_an_adapter_of_peft(folder, tmp_path):
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", modules_to_save=["embed_tokens"], init_lora_weights=False
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    theirs.save_pretrained(tmp_path)
    spec = spec_of(folder, modules_to_save=["embed_tokens"], init_from=str(tmp_path))
    ours = adapted(spec)
    if not ours.config.tie_word_embeddings:
        load_initial_adapter(ours, spec.adapter, spec.model)
        torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
        return
    # PEFT untied the embedding from the head, which our model cannot have.
    with pytest.raises(ValueError, match=r"1 tensors are missing \(base_model\.model\.lm_head\.weight\)"):
        load_initial_adapter(ours, spec.adapter, spec.model)


def test_a_run_starts_from_an_adapter_of_embeddings_of_peft(folder, tmp_path):
    """PEFT writes the embeddings themselves, too."""
    names = ["q_proj", "embed_tokens"]
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=names, init_lora_weights=False)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    spec = spec_of(folder, target_modules=names, init_from=str(tmp_path))
    ours = adapted(spec)
    load_initial_adapter(ours, spec.adapter, spec.model)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    # Embeddings that were trained before are another model's.
    ours.get_input_embeddings().base_layer.weight.data[3, 0] += 1
    with pytest.raises(ValueError, match=r"no place in this run's adapter \(.*embed_tokens\.base_layer\.weight\)"):
        load_initial_adapter(ours, spec.adapter, spec.model)


def test_modules_that_are_trained_whole_learn_with_what_is_tied_to_them(folder):
    model = adapted(spec_of(folder, modules_to_save=["lm_head"]))
    whole = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}
    assert whole == ({"model.embed_tokens.weight"} if model.config.tie_word_embeddings else {"lm_head.weight"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"modules_to_save": ["embed_token"]},
            "'embed_token' is not a module of the model; did you mean 'embed_tokens'",
        ),
        ({"modules_to_save": ["q_proj"]}, "'model.layers.0.self_attn.q_proj' has an adapter, too"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(folder, settings, said):
    with pytest.raises(ValueError, match=f"adapter.modules_to_save: {said}"):
        adapted(spec_of(folder, **settings))


@pytest.mark.parametrize(
    ("settings", "config", "said"),
    [
        ({"r": 8}, {}, r"adapter\.r is 8, and the adapter has 4\. Set the fields"),
        ({"lora_alpha": 8, "use_rslora": True}, {}, r"lora_alpha is 8\.0, .* 32\.0; adapter\.use_rslora is true"),
        (
            {"target_modules": ["q_proj"]},
            {},
            r"\d+ tensors have no place in this run's adapter .* adapter\.target_modules",
        ),
        ({"modules_to_save": ["norm"]}, {}, r"1 tensors are missing \(base_model\.model\.model\.norm\.weight\)"),
        ({}, {"peft_type": "IA3"}, r'peft_type "IA3" is not supported'),
        ({}, {"rank_pattern": {"q_proj": 2}}, r"rank_pattern .* is not supported"),
        ({}, {"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens \[5, 6\] is not supported"),
        ({"init_from": "/nowhere/at/all"}, {}, r"adapter\.init_from '/nowhere/at/all' is not a folder, and cannot"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder, settings, config, said, tmp_path):
    spec = spec_of(folder)
    write_adapter(trained(spec), spec.adapter, spec.model, tmp_path)
    file = tmp_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    other = spec_of(folder, **{"init_from": str(tmp_path)} | settings)
    with pytest.raises(ValueError, match=said):
        load_initial_adapter(adapted(other), other.adapter, other.model)


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    spec = spec_of(folder)
    write_adapter(trained(spec), spec.adapter, spec.model, tmp_path / "adapter")
    model = build_model(spec.model, 0)
    model.model.norm.weight.data += 1
    model.save_pretrained(tmp_path / "other")
    other = spec_of(tmp_path / "other", init_from=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="has other weights than those that the adapter was trained with"):
        load_initial_adapter(adapted(other), other.adapter, other.model)


def test_a_folder_without_an_adapter_is_refused(folder):
    other = spec_of(folder, init_from=str(folder))
    with pytest.raises(ValueError, match=r"adapter\.init_from: .* has no adapter_config\.json; give a folder"):
        load_initial_adapter(adapted(other), other.adapter, other.model)


def test_the_rates_of_lora_plus_are_those_of_peft(folder):
    base = RunSpec.model_validate({**spec_of(folder).model_dump(), "optimizer": {"lr": 1e-3}})
    spec = base.model_copy(update={"adapter": Lora(r=4, use_dora=True, loraplus_lr_ratio=16)})
    model = adapted(spec)
    ours = {id(p): group["lr"] for group in build_optimizer(model, spec).param_groups for p in group["params"]}
    peer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    theirs = {id(p): group["lr"] for group in peer.param_groups for p in group["params"]}
    assert ours == theirs
    assert set(ours.values()) == {1e-3, 16e-3}
