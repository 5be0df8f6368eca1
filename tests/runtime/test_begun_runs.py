"""A run that an earlier version has begun goes on as it began."""

import json

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.data import row_order
from tasks.runtime.run_folder.folder import RunFolder
from tests.runtime.helpers.comparable_runs import SAVED, STEPS, curve, make_spec
from tests.runtime.helpers.train_only import forget, train_spec

pytestmark = pytest.mark.usefixtures("narrowed")


def permutation_before(count, seed, number):
    """PyTorch's generator takes the low 32 bits, and so 8 of the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed((seed << 24) + number))


def test_a_begun_run_keeps_its_order_of_rows(tmp_path, monkeypatch):
    spec = RunSpec.model_validate({**make_spec(tmp_path, "begun", "torch", "single", 1).model_dump(), "seed": 257})
    with monkeypatch.context() as earlier:
        earlier.setattr(row_order, "_permutation", permutation_before)
        train_spec(spec)
    before = curve(spec)
    forget(spec, SAVED)
    # As that version wrote it, which also knew of no checksum.
    file = RunFolder.of(spec).checkpoints / f"checkpoint-{SAVED}" / "manifest.json"
    written = json.loads(file.read_text())
    for name in (row_order.SEED_BITS, "seal"):
        written.pop(name, None)
    file.write_text(json.dumps(written))
    train_spec(spec)
    assert curve(spec) == before
    # So does its next attempt.
    last = checkpoint.latest(RunFolder.of(spec).checkpoints)
    assert checkpoint.step_of(last) == STEPS
    assert checkpoint.metadata_of(last)[row_order.SEED_BITS] == row_order.FIRST_SEED_BITS
    new = RunSpec.model_validate({**spec.model_dump(), "name": "new"})
    train_spec(new)
    assert [loss for _, loss, *_ in curve(new)] != [loss for _, loss, *_ in before]
