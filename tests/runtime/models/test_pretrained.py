"""Pretrained weights are exactly those of the model."""

import json
import socket
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from strata_platform.spec.sections.model import Model
from tasks.runtime.export import check_folder
from tasks.runtime.models import pretrained
from tasks.runtime.models.build import build_model
from tasks.runtime.models.pretrained import advising_random_weights, load_pretrained, require_complete_weights
from tests.runtime.helpers.vision_models import gemma3

SIZES = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}


def save(folder, **changes):
    """A small model; `changes` are to its config.json alone, after it is saved."""
    tied = changes.pop("tied", False)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def change(folder, **tensors):
    held = load_file(folder / "model.safetensors")
    save_file({**held, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("device_map", [None, "meta"])
def test_a_complete_model_is_loaded(tmp_path, device_map):
    save(tmp_path)
    model = load_pretrained(str(tmp_path), device_map=device_map)
    assert {parameter.device.type for parameter in model.parameters()} == {device_map or "cpu"}
    if device_map is None:
        assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_tied_and_ignored_tensors_are_no_problem(tmp_path):
    save(tmp_path, tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    # As saved by early versions of transformers.
    change(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    model = load_pretrained(str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("device_map", [None, "meta"])
def test_a_head_of_its_own_that_the_config_ties_is_refused(tmp_path, device_map):
    """transformers would train it, but what is built of config.json has none: the export would be another model."""
    save(tmp_path, tied=True)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, **{"lm_head.weight": embeddings.clone()})
    assert load_pretrained(str(tmp_path), device_map=device_map).config.tie_word_embeddings
    change(tmp_path, **{"lm_head.weight": embeddings + 1})
    told = r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight, but .* set tie_word_embeddings to false"
    with pytest.raises(ValueError, match=told):
        load_pretrained(str(tmp_path), device_map=device_map)


def test_tied_tensors_are_compared_under_the_names_of_the_folder(tmp_path):
    """Of some families, transformers renames what it reads."""
    gemma3(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    assert name == "language_model.model.embed_tokens.weight"
    model = Model(name=str(tmp_path))
    for added, refused in ((0, False), (1, True)):
        change(tmp_path, **{"language_model.lm_head.weight": tensors[name] + added})
        with pytest.raises(ValueError, match=r"ties lm_head\.weight") if refused else nullcontext():
            require_complete_weights(model, RunSpec().objective)


def test_every_difference_is_told_at_once(tmp_path):
    save(tmp_path, num_hidden_layers=3, vocab_size=65)
    change(tmp_path, **{"score.weight": torch.ones(2, 8), "v_head": torch.ones(1)})
    with pytest.raises(ValueError) as caught:
        load_pretrained(str(tmp_path))
    assert str(caught.value) == (
        f"model.name '{tmp_path}': its weights are not those of the model that its config.json describes: 9 tensors "
        "are missing (model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, "
        "model.layers.2.mlp.gate_proj.weight, ...); 2 tensors are not part of the model (score.weight, v_head); "
        "2 tensors have other shapes (lm_head.weight [64, 8], not [65, 8], model.embed_tokens.weight [64, 8], not "
        "[65, 8]). Correct config.json, or fetch the folder's files again; a run would train random values or leave "
        "weights out"
    )


ADVICE = "; to train from scratch, set model.init to 'random'"


@pytest.mark.parametrize(
    ("names", "advised"),
    [
        (["config.json", "tokenizer.json"], True),
        (["config.json", "pytorch_model.bin"], False),
        (["config.json", "model.safetensors.index.json"], False),
        (["config.json", "Model-Q4_K_M.gguf"], False),
        (["config.json", "flax_model.msgpack"], False),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("on_the_hub", [False, True], ids=["folder", "Hub"])
def test_a_model_without_any_weights_may_be_trained_from_scratch(tmp_path, monkeypatch, names, advised, on_the_hub):
    for name in names:
        (tmp_path / name).write_text("{}")
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(pretrained.HfApi, "model_info", lambda self, name, revision, timeout: info)

    def lacks_a_file(*arguments, **options):
        raise OSError("in other words")

    monkeypatch.setattr(pretrained.AutoConfig, "from_pretrained", lacks_a_file)
    spec = RunSpec(model={"name": "acme/model" if on_the_hub else str(tmp_path)}, data={"source": "a.jsonl"})
    for ask in (build_model, require_complete_weights)[: 1 if on_the_hub else 2]:
        with pytest.raises(ValueError, match="in other words") as caught:
            ask(spec.model, spec.seed if ask is build_model else spec.objective)
        assert str(caught.value).endswith(ADVICE) is advised


def test_a_hub_that_lists_no_files_gives_no_advice():
    with pytest.raises(ValueError, match=r"model\.name 'acme/model' cannot be read: .* weights as safetensors$"):
        build_model(Model(name="acme/model"), 0)


def test_advice_does_not_wait_for_a_hub_that_never_answers(monkeypatch):
    monkeypatch.setattr(pretrained, "_ADVICE_TIMEOUT", 0.05)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The kernel accepts the connection, and nobody reads from it.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(pretrained, "HfApi", partial(HfApi, endpoint=endpoint))
        with pytest.raises(ValueError, match=r"^in other words$"), advising_random_weights("acme/model"):
            raise ValueError("in other words") from OSError()


def test_layers_that_are_cut_off_are_extra_tensors(tmp_path):
    save(tmp_path)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    assert load_pretrained(str(tmp_path), allow_extra=True, config=config).config.num_hidden_layers == 1
    with pytest.raises(ValueError, match="9 tensors are not part of the model"):
        load_pretrained(str(tmp_path), config=config)


def test_a_teacher_is_checked_by_its_own_field(tmp_path):
    save(tmp_path / "teacher", num_hidden_layers=1)
    spec = RunSpec(objective={"type": "distill", "teacher": str(tmp_path / "teacher")}, data={"source": "a.jsonl"})
    with pytest.raises(ValueError, match=r"^objective\.teacher: .*9 tensors are not part of the model"):
        require_complete_weights(spec.model, spec.objective)


def test_the_folder_of_a_reward_model_needs_no_head_for_scores(tmp_path):
    save(tmp_path)
    spec = RunSpec(model={"name": str(tmp_path)}, objective={"type": "reward"}, data={"source": "a.jsonl"})
    assert spec.model.head == "score"
    require_complete_weights(spec.model, spec.objective)
    save(tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match="10 tensors are missing"):
        require_complete_weights(spec.model, spec.objective)


def test_an_exported_folder_without_a_layer_is_not_verified(tmp_path, monkeypatch):
    """The process that reads an export ends with this error, and the export shows it."""
    save(tmp_path, num_hidden_layers=3)
    monkeypatch.setattr(check_folder.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    save_file({}, tmp_path / "expected.safetensors")
    given = [str(tmp_path), str(tmp_path / "expected.safetensors"), "cpu", "sdpa", "", "", ""]
    monkeypatch.setattr("sys.argv", ["check_folder", *given])
    with pytest.raises(ValueError, match="9 tensors are missing"):
        check_folder.main()
