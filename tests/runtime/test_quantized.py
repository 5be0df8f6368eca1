"""An adapter in a model of four bits a weight: it learns, comes back exactly, and is merged into the exact model."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from strata_platform.errors import SpecError
from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint.storage import Index
from tasks.runtime.folder import RunFolder
from tasks.runtime.parallel import require_installed
from tasks.runtime.record import CompletionRecord
from tasks.runtime.weights import build_trained_model, collect_weights
from tests.runtime.pretrained import save_pretrained
from tests.runtime.test_matrix import ROOT, SAVED, approx, curve, file_of, make_spec
from tests.runtime.train_only import train_spec

needed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def nf4(spec, **changes):
    adapter = {**spec.adapter.model_dump(), "quantization": "nf4"}
    return RunSpec.model_validate({**spec.model_dump(), "adapter": adapter, **changes})


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    save_pretrained(folder / "pretrained")
    return folder


@pytest.fixture(scope="module")
def alone(output):
    spec = nf4(make_spec(output, "alone", "torch", "single", 1, "lora"))
    assert train_spec(spec).status == "complete"
    return spec


@needed
def test_it_learns_and_comes_back_exactly(alone):
    first = curve(alone)
    assert first[-1][1] < first[0][1] - 0.1
    assert train_spec(alone, SAVED).status == "complete"
    assert curve(alone, attempt=1) == first[SAVED:]


@needed
def test_a_checkpoint_has_the_adapter_alone(alone):
    index = Index(checkpoint.latest(RunFolder.of(alone).checkpoints))
    assert {name.split(".")[-3] for name in index if name.startswith("model.")} == {"lora_A", "lora_B"}


@needed
def test_the_adapter_is_merged_into_the_exact_model(alone):
    record = CompletionRecord.load(RunFolder.of(alone).record)
    weights = collect_weights(alone, record)
    merged = build_trained_model(alone, weights)
    plain = build_trained_model(nf4(alone, adapter={**alone.adapter.model_dump(), "quantization": "none"}), weights)
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), plain.parameters(), strict=True))


@needed
def test_two_replicas_have_the_losses_of_one(alone, output):
    spec = nf4(make_spec(output, "replicas", "hf", "ddp", 2, "lora"))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.runtime.forked", "2", file_of(output, spec)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert curve(spec) == approx(curve(alone, attempt=0))
    assert json.loads(RunFolder.of(spec).record.read_text())["status"] == "complete"


def test_a_missing_package_is_named_with_its_extra(monkeypatch, output):
    monkeypatch.setattr("tasks.runtime.parallel.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"adapter\.quantization 'nf4' needs the package bitsandbytes.*strata\[bits"):
        require_installed(nf4(make_spec(output, "missing", "torch", "single", 1, "lora")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"type": "fsdp"}}, r"adapter\.quantization: 'nf4' packs weights .* set parallel\.type to 'ddp'"),
        ({"adapter": {"type": "lora", "quantization": "nf4", "use_dora": True}}, r"'nf4' hides the lengths"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    spec = make_spec("out", "refused", "torch", "ddp", 2, "lora")
    with pytest.raises(SpecError, match=message):
        nf4(spec, **changes)
