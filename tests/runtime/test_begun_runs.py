"""A run that an earlier version has begun goes on as it began."""

import json
import shutil

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.data import row_order
from tasks.runtime.optim import optimizer
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.resume_point import PEAK_LR
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, curve, make_spec
from tests.runtime.helpers.pretrained_folder import save_pretrained
from tests.runtime.helpers.train_only import forget, train_spec

pytestmark = pytest.mark.usefixtures("narrowed")


def leave_what_an_earlier_version_wrote(spec, *keys):
    """The first checkpoint, without `keys` of its metadata."""
    forget(spec, SAVED)
    file = RunFolder.of(spec).checkpoints / f"checkpoint-{SAVED}" / "manifest.json"
    written = json.loads(file.read_text())
    # The earliest ones have no checksum either.
    for name in (*keys, "seal"):
        written.pop(name)
    file.write_text(json.dumps(written))


def permutation_before(count, seed, number):
    """PyTorch's generator takes the low 32 bits, and so 8 of the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed((seed << 24) + number))


def test_a_begun_run_keeps_its_order_of_rows(tmp_path, monkeypatch):
    spec = RunSpec.model_validate({**make_spec(tmp_path, "begun", "torch", "single", 1).model_dump(), "seed": 257})
    with monkeypatch.context() as earlier:
        earlier.setattr(row_order, "_permutation", permutation_before)
        train_spec(spec)
    before = curve(spec)
    leave_what_an_earlier_version_wrote(spec, row_order.SEED_BITS)
    train_spec(spec)
    assert curve(spec) == before
    # So does its next attempt.
    last = checkpoint.latest(RunFolder.of(spec).checkpoints)
    assert checkpoint.step_of(last) == STEPS
    assert checkpoint.metadata_of(last)[row_order.SEED_BITS] == row_order.FIRST_SEED_BITS
    new = RunSpec.model_validate({**spec.model_dump(), "name": "new"})
    train_spec(new)
    assert [loss for _, loss, *_ in curve(new)] != [loss for _, loss, *_ in before]


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_a_begun_run_keeps_its_default_learning_rate(tmp_path, framework):
    """Adafactor's was 1e-2 for pretrained weights."""
    model = {"name": str(save_pretrained(tmp_path / "pretrained"))}
    values = make_spec(tmp_path, "rate", framework, "single", 1).model_dump() | {"model": model}
    asked = RunSpec.model_validate({**values, "name": "asked", "optimizer": {"type": "adafactor", "lr": 1e-2}})
    train_spec(asked)
    spec = RunSpec.model_validate({**values, "optimizer": {"type": "adafactor"}})
    train_spec(spec)
    rates = [rate for *_, rate, _, _ in curve(spec)]
    assert [rate for *_, rate, _, _ in curve(asked)] == pytest.approx([10 * rate for rate in rates])
    # The checkpoint of a run that began with the earlier default.
    shutil.rmtree(RunFolder.of(spec).checkpoints)
    shutil.copytree(RunFolder.of(asked).checkpoints, RunFolder.of(spec).checkpoints)
    leave_what_an_earlier_version_wrote(spec, PEAK_LR)
    train_spec(spec)
    assert curve(spec)[SAVED:] == curve(asked)[SAVED:]
    # So does a run whose rate is noted.
    forget(spec, SAVED)
    train_spec(spec)
    assert curve(spec)[SAVED:] == curve(asked)[SAVED:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_begun_run_goes_on_with_weights_that_muon_no_longer_steps(tmp_path, monkeypatch, caplog, dtype):
    """Muon stepped a head that scores, and norms of several heads; AdamW begins with new moments."""
    values = make_spec(tmp_path, "muon", "torch", "single", 1).model_dump()
    model = {**values["model"], "dtype": dtype}
    spec = RunSpec.model_validate({**values, "model": model, "optimizer": {"type": "muon"}})
    train_spec(spec)
    before = curve(spec)
    forget(spec, SAVED)

    def heads(model):
        return {id(layer.self_attn.q_proj.weight) for layer in model.model.layers}

    monkeypatch.setattr(optimizer, "_heads", heads)
    with caplog.at_level("WARNING", "tasks"):
        train_spec(spec)
    assert "moments of 2 weights begin anew: AdamW steps them now, not Muon" in caplog.text
    after = curve(spec)
    assert after[: SAVED + 1] == before[: SAVED + 1] and after[SAVED + 1 :] != before[SAVED + 1 :]
    assert [loss for _, loss, *_ in after] == pytest.approx([loss for _, loss, *_ in before], rel=0.05)
