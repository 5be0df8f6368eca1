"""A run of the whole model is not continued, nor complete, for other initial weights than it began with."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.models.initial_weights import initial_weights
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
    """Its checkpoints keep the digest of the first start; the folder is compared, and not recorded again."""
    spec, _ = run
    began = initial_weights(spec.model, spec.adapter)
    monkeypatch.setattr(train, "initial_weights", lambda *sections: pytest.fail("read again"))
    train_spec(spec, SAVED)
    metadata = checkpoint.metadata_of(checkpoint.latest(RunFolder.of(spec).checkpoints))
    assert began and began.items() <= metadata.items()


def test_files_and_dtype_are_of_no_account(run, output):
    spec, _ = run
    before = initial_weights(spec.model, spec.adapter)
    _, save = saved(spec, torch.bfloat16, max_shard_size="200KB")
    save()
    (output / "pretrained" / "model.safetensors").unlink()
    assert before and initial_weights(spec.model, spec.adapter) == before
    # Of files that the index does not name, transformers reads none.
    shard = next((output / "pretrained").glob("model-00001-*"))
    shutil.copy(shard, shard.with_name("model-old.safetensors"))
    assert initial_weights(spec.model, spec.adapter) == before
    shard.write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.name '.*pretrained'"):
        initial_weights(spec.model, spec.adapter)


def test_a_preset_and_an_adapter_have_no_digest(run, output):
    for spec in (RunSpec(), make_spec(output, "lora", "torch", "single", 1, "lora")):
        assert initial_weights(spec.model, spec.adapter) == {}
