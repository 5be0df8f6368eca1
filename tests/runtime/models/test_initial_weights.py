"""A run is not continued, nor complete, for other initial weights than it began with, unless the Hub has them."""

import json
import logging
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime.models.initial_weights import initial_weights, require_initial_weights
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training import train
from tests.runtime.helpers.comparable_runs import SAVED, curve, make_spec
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")


@pytest.fixture(scope="module")
def run(output):
    save_pretrained(output / "pretrained")
    values = make_spec(output, "whole", "torch", "single", 1).model_dump()
    values["model"] |= {"name": str(output / "pretrained"), "dtype": "float32"}
    spec = RunSpec.model_validate(values)
    train_spec(spec)
    return spec, curve(spec)


def saved(spec, dtype=torch.float32, **options):
    """The folder's model, to change; what is returned saves it."""
    model = AutoModelForCausalLM.from_pretrained(spec.model.name, dtype=dtype)
    return model, lambda: model.save_pretrained(spec.model.name, **options)


def test_the_last_row_of_one_matrix_is_told_apart(run):
    spec, expected = run
    model, save = saved(spec)
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[-1, 0] += 1
    save()
    # Interrupted after step `SAVED`, and complete.
    for step in (None, SAVED):
        with pytest.raises(ValueError, match=r"model\.name '.*pretrained' has other weights than .* another name"):
            train_spec(spec, step)
    weight[-1, 0] -= 1
    save()
    assert train_spec(spec).status == "complete"
    assert curve(spec) == expected


def test_a_resumed_run_keeps_what_it_began_with(run, monkeypatch):
    """The folder is compared, and not recorded again."""
    spec, _ = run
    began = RunFolder.of(spec).initial_weights_ids
    assert began.keys() == {"model.name"} and began == initial_weights(spec)
    monkeypatch.setattr(train, "initial_weights", lambda spec: pytest.fail("read again"))
    train_spec(spec, SAVED)
    assert RunFolder.of(spec).initial_weights_ids == began


def test_files_and_dtype_do_not_count(run, output):
    spec, _ = run
    before = initial_weights(spec)
    _, save = saved(spec, torch.bfloat16, max_shard_size="200KB")
    save()
    (output / "pretrained" / "model.safetensors").unlink()
    assert before and initial_weights(spec) == before
    # Of files that the index does not name, transformers reads none.
    shard = next((output / "pretrained").glob("model-00001-*"))
    shutil.copy(shard, shard.with_name("model-old.safetensors"))
    assert initial_weights(spec) == before
    shard.write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.name '.*pretrained'"):
        initial_weights(spec)


@pytest.mark.parametrize(("field", "tied"), [("model.name", True), ("model.name", False), ("adapter.init_from", True)])
def test_only_a_copy_of_a_tied_head_does_not_count(field, tied, tmp_path):
    """In an adapter's folder, the head has values of its own."""
    values, file = named(str(tmp_path))[field]
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path / "gone")}, **values})
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    whole = {"model.embed_tokens.weight": torch.eye(2), "lm_head.weight": torch.eye(2)}
    found = []
    for name in ("", "lm_head.weight"):
        save_file({key: tensor for key, tensor in whole.items() if key != name}, tmp_path / file)
        found.append(initial_weights(spec))
    assert (found[0] == found[1]) == (tied and field == "model.name")


def named(name):
    """Specs that name weights, by the field; with the file that has these and the one of the model."""
    rewards = [{"function": "a.b:c"}, {"model": name}]
    prompts = {"source": "acme/prompts", "sequence_length": 512}
    return {
        "model.name": ({"model": {"name": name}}, "model.safetensors"),
        "adapter.init_from": ({"adapter": {"type": "lora", "init_from": name}}, "adapter_model.safetensors"),
        "objective.teacher": ({"objective": {"type": "distill", "teacher": name}}, "model.safetensors"),
        "objective.rewards[1].model": (
            {"data": prompts, "objective": {"type": "grpo", "rewards": rewards}},
            "model.safetensors",
        ),
    }


FIELDS = tuple(named(""))
PINNED_BY = {"model.name": "model.revision", "objective.teacher": "objective.teacher_revision"}


@pytest.mark.parametrize("field", FIELDS)
def test_weights_of_every_field_are_told_apart(field, tmp_path):
    values, file = named(str(tmp_path / "weights"))[field]
    (tmp_path / "weights").mkdir()
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path / "gone")}, **values})

    def write(last):
        save_file({"x.weight": torch.tensor([[1.0, 2.0], [3.0, last]])}, tmp_path / "weights" / file)

    write(4.0)
    expected = initial_weights(spec)
    assert expected.keys() == {field}
    require_initial_weights(spec, expected)
    write(5.0)
    require_initial_weights(spec, {})
    said = f"{field} '{tmp_path}/weights' has other weights than when this run began; restore the folder"
    with pytest.raises(ValueError, match=re.escape(said)):
        require_initial_weights(spec, expected)
    (tmp_path / "weights" / file).write_bytes(b"torn")
    with pytest.raises(ValueError, match=re.escape(f"{field} '{tmp_path}/weights' cannot be read")):
        initial_weights(spec)


@pytest.mark.parametrize("field", FIELDS)
def test_configurations_of_every_field_are_told_apart(field, tmp_path):
    values, _ = named(str(tmp_path))[field]
    name = "adapter_config.json" if field == "adapter.init_from" else "config.json"
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path / "gone")}, **values})

    def write(theta, version):
        inner = {"rope_theta": theta, "dtype": version}
        (tmp_path / name).write_text(json.dumps({"text_config": inner, "transformers_version": version}))

    write(1e4, "4")
    expected = initial_weights(spec)
    # As of the same model that is saved anew.
    write(1e4, "5")
    require_initial_weights(spec, expected)
    write(1e6, "5")
    said = f"{field} '{tmp_path}' has another {name} than when this run began; restore the folder"
    with pytest.raises(ValueError, match=re.escape(said)):
        require_initial_weights(spec, expected)


def test_a_configuration_that_transformers_saves_in_another_form_is_the_same(tmp_path):
    """As of a model of the Hub that is saved in other files: settings are renamed, and defaults are added."""
    spec, file = RunSpec.model_validate({"model": {"name": str(tmp_path)}}), tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 128}
    file.write_text(json.dumps({"model_type": "llama", **sizes, "rope_theta": 5e5, "rope_scaling": None}))
    expected = initial_weights(spec)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads(file.read_text()) and initial_weights(spec) != expected
    require_initial_weights(spec, expected)
    file.write_text(file.read_text().replace("500000.0", "10000.0"))
    with pytest.raises(ValueError, match=r"model\.name '.*' has another config\.json than when this run began"):
        require_initial_weights(spec, expected)


def test_modules_of_an_adapter_are_in_any_order(tmp_path):
    """PEFT keeps them in a set, so that an adapter that is exported again has another order."""
    spec = RunSpec.model_validate({
        "model": {"name": str(tmp_path / "gone")}, "adapter": {"type": "lora", "init_from": str(tmp_path)},
    })  # fmt: skip
    found = []
    for modules in (["q_proj", "v_proj"], ["v_proj", "q_proj"], ["q_proj"], "all-linear"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": modules}))
        found.append(initial_weights(spec)["adapter.init_from"])
    assert found[0] == found[1] and len({*found}) == 3


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": []}'])
def test_an_index_without_a_map_is_told(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.name '.*' cannot be read: .*index\.json has no weight_map"):
        initial_weights(RunSpec.model_validate({"model": {"name": str(tmp_path)}}))


def test_of_random_weights_the_configuration_is_compared(tmp_path):
    assert initial_weights(RunSpec()) == {}
    spec = RunSpec.model_validate({"model": {"name": str(tmp_path), "init": "random"}})
    assert initial_weights(spec) == {}
    (tmp_path / "config.json").write_text('{"rope_theta": 1e4}')
    expected = initial_weights(spec)
    save_file({"x.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    require_initial_weights(spec, expected)
    (tmp_path / "config.json").write_text('{"rope_theta": 1e6}')
    with pytest.raises(ValueError, match=r"model\.name '.*' has another config\.json than when this run began"):
        require_initial_weights(spec, expected)


A, B = "a" * 40, "b" * 40


@pytest.fixture
def hub(output, tmp_path, monkeypatch):
    """The cache of the Hub with two commits, and a function by which `main` moves to one of them."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--acme--model"
    first = save_pretrained(tmp_path / "made")
    shutil.copytree(first, repository / "snapshots" / A, ignore=shutil.ignore_patterns("made"))
    shutil.copytree(repository / "snapshots" / A, repository / "snapshots" / B)
    model = AutoModelForCausalLM.from_pretrained(repository / "snapshots" / A, dtype=torch.float32)
    model.model.embed_tokens.weight.data[0, 0] += 1
    model.save_pretrained(repository / "snapshots" / B)
    (repository / "refs").mkdir()

    def move(commit):
        (repository / "refs" / "main").write_text(commit)

    move(A)
    return move


def hub_spec(output, adapter, **model):
    values = make_spec(output, "hub", "torch", "single", 1, adapter).model_dump()
    values["model"] |= {"name": "acme/model", "dtype": "float32", **model}
    return RunSpec.model_validate(values)


MOVED = f"model.name 'acme/model': this run began with commit {A} of the Hub, which has {B} now"


def test_a_run_of_the_whole_model_goes_on_after_its_repository_moved_and_says_so(hub, tmp_path, caplog):
    spec = hub_spec(tmp_path, "none", revision="main")
    train_spec(spec)
    expected = curve(spec)
    assert "of the Hub" not in caplog.text
    hub(B)
    for step in (SAVED, None):
        caplog.clear()
        train_spec(spec, step)
        (told,) = [record for record in caplog.records if record.getMessage().startswith(MOVED)]
        assert told.levelno == logging.WARNING and f"set model.revision to {A}" in told.getMessage()
        assert curve(spec) == expected
    # The way out that it names, and no other.
    caplog.clear()
    pinned = hub_spec(tmp_path, "none", revision=A)
    train_spec(pinned, SAVED)
    assert "of the Hub" not in caplog.text and curve(pinned) == expected
    with pytest.raises(ValueError, match=rf"model\.revision was '{A}', is '{B}'"):
        train_spec(hub_spec(tmp_path, "none", revision=B))


def test_a_folder_that_is_gone_is_no_commit(hub, tmp_path, caplog):
    """The Hub has a model of the folder's relative path."""
    require_initial_weights(hub_spec(tmp_path, "none"), {"model.name": "0123456789abcdef"})
    assert f"this run began with a local folder, which is gone, and the Hub has commit {A}." in caplog.text
    assert "restore the folder" in caplog.text and "model.revision" not in caplog.text
    assert "0123456789abcdef" not in caplog.text


@pytest.mark.parametrize("field", FIELDS)
def test_a_branch_of_every_field_is_told_from_where_it_was(hub, tmp_path, caplog, field):
    for commit in (tmp_path / "hub" / "models--acme--model" / "snapshots").iterdir():
        (commit / "adapter_config.json").write_text("{}")
    values, pinned = named("acme/model")[field][0], PINNED_BY.get(field)
    values = {"name": "x", "output": str(tmp_path), "model": {"name": str(tmp_path / "gone")}, **values}
    spec, folder = RunSpec.model_validate(values), RunFolder(tmp_path / "x")
    folder.claim(spec)
    folder.write_initial_weights_ids(initial_weights(spec))
    assert folder.initial_weights_ids == {field: A}
    hub(B)
    require_initial_weights(spec, folder.initial_weights_ids)
    said = f"{field} 'acme/model': this run began with commit {A} of the Hub, which has {B} now."
    assert said in caplog.text and (f"set {pinned} to {A}; to train" in caplog.text) == bool(pinned)
    assert pinned or "do not have. To train with the new one" in caplog.text
    if pinned:
        section, _, name = pinned.partition(".")
        for commit in (A, B):
            other = {**values, section: {**values[section], name: commit}}
            assert (folder.differences_from(RunSpec.model_validate(other)) == []) == (commit == A)


def test_an_adapter_goes_on_with_the_commit_of_its_frozen_weights(hub, tmp_path, caplog):
    spec = hub_spec(tmp_path, "lora")
    train_spec(spec)
    expected = curve(spec)
    hub(B)
    with pytest.raises(ValueError, match=r"the adapter was trained with; .* pin a Hub model with model\.revision"):
        train_spec(spec, SAVED)
    assert MOVED in caplog.text
    pinned = hub_spec(tmp_path, "lora", revision=A)
    train_spec(pinned)
    assert curve(pinned) == expected


@pytest.mark.parametrize(("answers", "commit"), [(True, B), (False, A)])
def test_the_hub_tells_the_commit_or_the_cache_if_it_does_not_answer(hub, tmp_path, monkeypatch, answers, commit):
    def info(hub, name, revision, timeout):
        # Without a time limit, a start would wait for a Hub that accepts connections and never answers.
        assert (name, revision) == ("acme/model", None) and timeout <= 60
        if not answers:
            raise TimeoutError
        return SimpleNamespace(sha=B)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    assert initial_weights(hub_spec(tmp_path, "none")) == {"model.name": commit}


def test_offline_the_cache_tells_the_commit(hub, tmp_path):
    other = {"name": "acme/other"}
    assert initial_weights(hub_spec(tmp_path, "none")) == {"model.name": A}
    assert initial_weights(hub_spec(tmp_path, "none", **other)) == {}
    assert initial_weights(hub_spec(tmp_path, "none", revision=B, **other)) == {"model.name": B}
