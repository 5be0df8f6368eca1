"""The warm-up compiles what a step launches, and never stands in a run's way."""

import sys

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import warm
from tasks.runtime.folder import RunFolder
from tasks.runtime.plan import plan_of

SMALL = {"data": {"sequence_length": 64}, "training": {"micro_batch_size": 2}}


def kernels(**changes):
    return {item.name for item in plan_of(RunSpec.model_validate({**SMALL, **changes})).specializations}


def test_the_plan_has_forward_backward_and_loss():
    assert kernels() >= {
        "norm_fwd_kernel",
        "norm_bwd_kernel",
        "rope_kernel",
        "activation_bwd_kernel",
        "cross_entropy_kernel",
    }


def test_what_is_excluded_is_not_compiled():
    assert not {name for name in kernels(kernels={"exclude": ["swiglu"]}) if name.startswith("activation")}


@pytest.mark.parametrize("kind", ["full", "per_op"])
def test_recomputation_adds_no_other_kernels(kind):
    assert kernels(training={"micro_batch_size": 2, "gradient_checkpointing": kind}) == kernels()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, "no GPU here"), ({"kernels": {"enabled": False}}, "kernels.enabled is false")],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is something to compile")
def test_nothing_to_warm_is_said(tmp_path, changes, reason):
    spec = RunSpec.model_validate({"output": str(tmp_path), **changes})
    assert reason in warm.ensure_warm(spec, RunFolder.of(spec))["skipped"]


@pytest.fixture
def with_gpu(monkeypatch):
    # The process that would compile is real; that it should is what has to be pretended here.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(warm.DONE, "")
    monkeypatch.delenv(warm.DONE)


def test_a_warm_up_that_fails_is_reported_and_not_tried_again(tmp_path, monkeypatch, with_gpu, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    spec = RunSpec(output=str(tmp_path))
    report = warm.ensure_warm(spec, RunFolder.of(spec))
    assert report == {"skipped": "its process ended with code 1"}
    assert "training starts all the same" in caplog.text
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert warm.ensure_warm(spec, RunFolder.of(spec)) == report


def test_a_warm_up_that_does_not_start_is_reported(tmp_path, monkeypatch, with_gpu):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    spec = RunSpec(output=str(tmp_path))
    assert "its process did not start" in warm.ensure_warm(spec, RunFolder.of(spec))["skipped"]


def test_a_warm_up_that_hangs_is_given_up(tmp_path, monkeypatch, with_gpu):
    hang = tmp_path / "hang"
    hang.write_text("#!/bin/sh\nexec sleep 600\n")
    hang.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hang))
    spec = RunSpec.model_validate({"output": str(tmp_path), "kernels": {"warmup_timeout": 1}})
    assert "given up after kernels.warmup_timeout 1 s" in warm.ensure_warm(spec, RunFolder.of(spec))["skipped"]


def test_only_one_process_of_a_pod_warms_up(tmp_path, monkeypatch, with_gpu):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    spec = RunSpec(output=str(tmp_path))
    assert warm.ensure_warm(spec, RunFolder.of(spec)) == {}
