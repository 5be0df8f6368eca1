"""Building models: presets, dtypes, tokenizers."""

import json
import os
from copy import deepcopy
from typing import get_args

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from strata_kernels.patch.table import OPERATORS
from strata_platform.spec import DataRecipe, RunSpec
from strata_platform.spec.sections.kernels import Kernels
from strata_platform.spec.sections.model import PRESETS as NAMES
from strata_platform.spec.sections.model import Model
from strata_platform.spec.sections.objectives import Pretrain
from tasks.runtime.checkpoint import latest
from tasks.runtime.checkpoint.state import dtypes_of, set_dtypes
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.preparation.tokenizer import save_tokenizer, train_tokenizer
from tasks.runtime.models.build import (
    build_model,
    build_model_on_meta,
    build_planning_model,
    build_saved_model,
    freeze_non_text_parameters,
    has_fused_loss,
    materialize,
    patch_for_training,
    require_embeddings,
    set_special_tokens,
)
from tasks.runtime.models.config import PRESETS, load_config
from tasks.runtime.models.pretrained import require_complete_weights
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.process.ranks import Processes
from tests.kernels.helpers.tiny_models import build_tiny


def test_every_preset_of_the_spec_can_be_built():
    assert set(PRESETS) == set(NAMES)


def test_every_operator_that_models_are_patched_with_can_be_excluded():
    names, _ = get_args(Kernels.model_fields["exclude"].annotation)
    assert get_args(names) == OPERATORS


def test_a_preset_starts_from_the_seed():
    first, again, other = (build_model(Model(), seed) for seed in (1, 1, 2))
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


GPT2 = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
DEEPSEEK = AutoConfig.for_model(
    "deepseek_v3",
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
    topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    first_k_dense_replace=1,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [GPT2, DEEPSEEK], ids=lambda config: config.model_type)
def test_random_weights_are_those_that_transformers_draws_for_a_configuration(tmp_path, config, dtype):
    config = deepcopy(config)
    # That of published weights, which does not decide how random ones are drawn.
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "sizes")
    settings = Model(name=str(tmp_path / "sizes"), init="random", dtype=str(dtype).removeprefix("torch."))
    require_complete_weights(settings, Pretrain())
    built = build_model(settings, 3)
    torch.manual_seed(3)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = built.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert all(
        torch.equal(weights[name], tensor.to(weights[name].dtype)) for name, tensor in expected.state_dict().items()
    )
    assert built.dtype == built.config.dtype == dtype
    # What the family keeps in fp32 is that of the same model with weights in a folder.
    expected.save_pretrained(tmp_path / "weights")
    read = build_model(settings.model_copy(update={"name": str(tmp_path / "weights"), "init": "pretrained"}), 0)
    assert dtypes_of(built) == dtypes_of(read)


@pytest.mark.parametrize("family", ["falcon_h1", "minimax", "olmo_hybrid"])
def test_random_weights_have_the_dtypes_of_read_ones_and_the_buffers_of_other_processes(family, tmp_path):
    """Such as factors of Mamba's products, which the family computes in the dtype of the weights."""
    build_tiny(family).save_pretrained(tmp_path)
    settings = Model(name=str(tmp_path), init="random", dtype="bfloat16")
    built, empty = build_model(settings, 0), build_model_on_meta(settings)
    assert dtypes_of(built) == dtypes_of(build_model(settings.model_copy(update={"init": "pretrained"}), 0))
    for (name, buffer), (_, expected) in zip(built.named_buffers(), empty.named_buffers(), strict=True):
        assert buffer.dtype == expected.dtype and torch.equal(buffer, expected), name
    built(input_ids=torch.arange(9)[None])


def test_random_weights_take_the_place_of_those_in_the_folder(tmp_path):
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path)
    first, again, other = (build_model(Model(name=str(tmp_path), init="random"), seed) for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    trained = build_model(Model(name=str(tmp_path), init="random"), 1, weights=str(tmp_path))
    assert torch.equal(trained.lm_head.weight, build_model(Model(name=str(tmp_path)), 0).lm_head.weight)


def test_every_dtype_starts_from_the_same_weights():
    exact = build_model(Model(dtype="float32"), 0)
    rounded = build_model(Model(dtype="bfloat16"), 0)
    assert rounded.dtype == rounded.config.dtype == torch.bfloat16
    assert torch.equal(exact.model.embed_tokens.weight.bfloat16(), rounded.model.embed_tokens.weight)


def save(model, root):
    writer = CheckpointWriter(root, model, build_optimizer(model, RunSpec()), Processes(), keep_last=1, metadata={})
    writer.save(1)
    writer.wait()
    return latest(root)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_is_the_same_on_every_process_and_after_a_restart(tmp_path, dtype):
    spec = RunSpec(model={"dtype": dtype})
    built = build_model(spec.model, spec.seed)
    expected = dict(built.named_buffers())
    assert expected
    for model in (build_model_on_meta(spec.model), build_saved_model(save(built, tmp_path))):
        found = dict(model.named_buffers())
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == buffer.dtype for name, buffer in expected.items())
        assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())
        assert {p.dtype for p in model.parameters()} == {p.dtype for p in built.parameters()}


def test_what_a_family_keeps_in_fp32_is_fp32_on_every_process_and_after_a_restart(tmp_path):
    AutoModelForCausalLM.from_config(deepcopy(DEEPSEEK)).save_pretrained(tmp_path / "hub")
    spec = RunSpec(model={"name": str(tmp_path / "hub"), "dtype": "bfloat16"})
    built = build_model(spec.model, spec.seed)
    empty = build_model_on_meta(spec.model)
    assert set(dtypes_of(built).values()) == {torch.bfloat16, torch.float32}
    # From 5.24 on, transformers knows the dtypes of a model without weights, too.
    assert dtypes_of(empty) != dtypes_of(built) or transformers.__version__ >= "5.24"
    set_dtypes(empty, dtypes_of(built))
    assert dtypes_of(empty) == dtypes_of(build_saved_model(save(built, tmp_path))) == dtypes_of(built)


def test_what_a_family_does_not_have_learn_learns_on_no_process_and_not_after_a_restart(tmp_path):
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, moe_num_experts=4, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hub")
    spec = RunSpec(model={"name": str(tmp_path / "hub"), "dtype": "float32"})
    built = build_model(spec.model, spec.seed)
    frozen = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"}
    for model in (build_model_on_meta(spec.model), build_saved_model(save(built, tmp_path))):
        assert frozen == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "top_h": 0.4, "length_penalty": 2.0},
        {"pad_token_id": -1},
        {"output_scores": True, "output_attentions": True},
        {"use_cache": False, "cache_implementation": "static"},
    ],
)
def test_a_model_whose_settings_for_generation_contradict_can_be_saved(tmp_path, settings):
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, **settings}))
    again = build_model(Model(name=str(tmp_path / "hub")), 0)
    # As an export says where answers end: settings that nobody changed may be saved as they are.
    again.generation_config.eos_token_id = [2, 3]
    assert build_saved_model(save(again, tmp_path)).generation_config.max_new_tokens == 7


def test_buffers_under_two_names_keep_their_values():
    model = build_model_on_meta(Model())
    model.again = torch.nn.Module()
    model.again.register_buffer("inv_freq", model.model.rotary_emb.inv_freq)
    expected = model.again.inv_freq.clone()
    materialize(model, torch.device("cpu"))
    assert torch.equal(model.again.inv_freq, expected)


def test_building_one_model_leaves_the_next_as_it_was():
    build_model(Model(attention="eager"), 0).config.hidden_size = 1
    assert build_model(Model(), 0).config.hidden_size == PRESETS["tiny-llama"]["hidden_size"]


def test_the_meta_model_has_the_same_parameters():
    meta, real = build_planning_model(Model(), torch.float32), build_model(Model(), 0)
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in (meta, real)]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in meta.parameters())


@pytest.fixture(scope="module")
def beyond(tmp_path_factory):
    """A model whose own tokenizer has a token more than it embeds."""
    folder = tmp_path_factory.mktemp("beyond")
    tokenizer = train_tokenizer(["2 + 2 = 4"])
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    save_tokenizer(tokenizer, folder)
    return folder


def prepared(folder, model, text):
    (folder / "rows.jsonl").write_text(json.dumps({"text": text}))
    data = {"source": str(folder / "rows.jsonl"), "sequence_length": 16, "special_tokens": "control"}
    spec = RunSpec(model={"name": str(model)}, data=data, objective={"type": "pretrain"})
    return spec.model, prepare(DataRecipe.from_spec(spec, fingerprint(spec)), folder / "data", report=print)


def test_a_token_that_the_model_does_not_embed_is_warned_of_where_no_row_has_it(beyond, tmp_path, caplog):
    require_embeddings(*prepared(tmp_path, beyond, "2 + 2 = 4"))
    assert "has no embedding for '<image>' of the tokenizer; no row contains them" in caplog.text
    settings, data = prepared(tmp_path, beyond, "2 + 2 = <image>")
    with pytest.raises(ValueError, match=r"data\.source: its rows have the token '<image>', number \d+, but model"):
        require_embeddings(settings, data)


def test_kernels_can_be_turned_off():
    assert patch_for_training(build_model(Model(), 0), Kernels(enabled=False)) is None
    report = patch_for_training(build_model(Model(), 0), Kernels(exclude=["rope"]))
    assert set(report.counts) == {"rms_norm", "swiglu", "linear_cross_entropy"}


def test_a_family_without_a_row_trains_by_default_and_is_refused_where_all_operators_are_asked_for():
    config = GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, n_positions=64, bos_token_id=1, eos_token_id=2)
    report = patch_for_training(GPT2LMHeadModel(config), Kernels())
    assert report.counts == {"layer_norm": 3, "linear_cross_entropy": 1} and has_fused_loss(report)
    llama = LlamaConfig(hidden_act="gelu", **{**PRESETS["tiny-llama"], "num_hidden_layers": 1})
    assert "swiglu" in patch_for_training(LlamaForCausalLM(llama), Kernels()).kept
    with pytest.raises(ValueError, match=r"kernels\.enabled is true, but swiglu: .* Set it to auto, which keeps"):
        patch_for_training(LlamaForCausalLM(llama), Kernels(enabled=True))


@pytest.mark.parametrize("enabled", [True, False, "auto"])
def test_a_model_with_a_loss_of_its_own_is_refused(enabled):
    """BART's decoder takes labels that are shifted already and averages over its own batch."""
    config = BartConfig(vocab_size=64, d_model=8, decoder_layers=1, decoder_attention_heads=1, decoder_ffn_dim=8)
    kernels = Kernels(enabled=enabled, exclude=["linear_cross_entropy"])
    with pytest.raises(ValueError, match="BartForCausalLM computes its loss with its own code"):
        patch_for_training(BartForCausalLM(config), kernels)


def test_a_loss_that_is_not_fused_is_transformers_own():
    report = patch_for_training(build_model(Model(), 0), Kernels(exclude=["linear_cross_entropy"]))
    assert not has_fused_loss(report)


@pytest.fixture
def seeing():
    """A model that sees as well; its own configuration has no special tokens, that of its text has."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": None}
    config = Gemma3Config(text_config=text, vision_config={**size, "image_size": 28, "patch_size": 14})
    return AutoModelForCausalLM.from_config(config)


def test_of_a_model_that_sees_as_well_learns_what_texts_come_to(seeing):
    freeze_non_text_parameters(seeing)
    tokens = torch.arange(8)[None]
    seeing(input_ids=tokens, labels=tokens).loss.backward()
    reached = {name for name, parameter in seeing.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, parameter in seeing.named_parameters() if parameter.requires_grad}
    assert not any("vision" in name for name in reached)


def test_a_model_that_sees_as_well_gets_special_tokens_where_its_text_has_none(seeing):
    tokenizer = train_tokenizer(["2 + 2 = 4"])
    assert not hasattr(seeing.config, "bos_token_id")
    set_special_tokens(seeing, tokenizer)
    assert seeing.config.text_config.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(seeing.config, "eos_token_id")


def test_a_process_reads_a_configuration_once(tmp_path, monkeypatch):
    LlamaConfig(vocab_size=11).save_pretrained(tmp_path)
    os.utime(tmp_path / "config.json", ns=(0, 1))
    read, reads = AutoConfig.from_pretrained, []
    monkeypatch.setattr(
        AutoConfig, "from_pretrained", lambda *names, **rest: reads.append(names) or read(*names, **rest)
    )
    model = Model(name=str(tmp_path))
    load_config(model).vocab_size = 12
    assert (load_config(model).vocab_size, len(reads)) == (11, 1)
    LlamaConfig(vocab_size=13).save_pretrained(tmp_path)
    assert (load_config(model).vocab_size, len(reads)) == (13, 2)


def test_a_family_that_a_version_of_transformers_breaks_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    AutoConfig.for_model("llama4").save_pretrained(tmp_path)
    # The module that it has: importing TRL puts another in the place of transformers.
    monkeypatch.setattr("tasks.runtime.models.config.transformers.__version__", "5.24.0")
    with pytest.raises(ValueError, match=r"llama4 does not run with transformers 5\.24\.0.*; install another version"):
        load_config(Model(name=str(tmp_path)))


def test_a_tokenizer_too_large_for_random_weights_says_which_size_the_configuration_needs(beyond, tmp_path):
    settings, data = prepared(tmp_path, beyond, "2 + 2 = 4")
    LlamaConfig(vocab_size=64).save_pretrained(tmp_path / "small")
    small = settings.model_copy(update={"name": str(tmp_path / "small"), "init": "random", "tokenizer": str(beyond)})
    with pytest.raises(ValueError, match=rf"embeds 64; .*vocab_size of at least {len(data.tokenizer())}$"):
        require_embeddings(small, data)
