"""The Hugging Face Trainer drives the loop, and adds nothing of its own to what the job computes."""

import os

import pytest
from transformers import LlamaForCausalLM, Trainer

from strata_platform.spec import RunSpec
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.run_folder.metrics_file import read_points
from tasks.runtime.training.frameworks.hf import arguments
from tests.runtime.helpers.train_only import train_spec

pytestmark = pytest.mark.usefixtures("narrowed")


def make_spec(output, name, framework="hf"):
    return RunSpec.model_validate(
        {
            "name": name,
            "output": str(output),
            "data": {"sequence_length": 64, "max_samples": 60},
            "training": {"steps": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 3},
            "tracking": {"log_every": 1, "report_to": []},
            "runtime": {"framework": framework},
        }
    )


def curve(spec):
    return [(point.step, point.loss, point.grad_norm) for point in read_points(RunFolder.of(spec).metrics)]


@pytest.fixture(scope="module")
def reference(output):
    """The curve of the plain loop."""
    spec = make_spec(output, "reference", "torch")
    assert train_spec(spec).status == "complete"
    return curve(spec)


def test_a_model_whose_own_loss_is_a_mean_over_a_micro_batch_is_trained_alike(output, reference, monkeypatch):
    """Such as Gemma 4: of a class like this the Trainer divides what it is given by the micro-batches of a step."""
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    spec = make_spec(output, "mean")
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference


def test_what_accelerate_reads_of_the_environment_changes_nothing(output, reference, monkeypatch):
    said = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "fp16"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    spec = make_spec(output, "environment")
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference
    assert {name: os.environ.get(name) for name in said} == said


def test_accelerate_leaves_the_optimizer_s_state_where_it_is(output, reference, monkeypatch):
    """It would move state from host memory to the GPU when a run continues, beside weights that stay there."""

    def move(*_):
        raise AssertionError("accelerate moves the optimizer's state")

    monkeypatch.setattr("accelerate.optimizer.move_to_device", move)
    spec = make_spec(output, "unmoved")
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference


def test_the_host_does_not_wait_for_the_gpu_in_each_micro_batch(output, reference, monkeypatch):
    def wait(*_):
        raise AssertionError("the Trainer copies a batch and waits for the copies, or counts parameters")

    for name in ("_prepare_input", "floating_point_ops"):
        monkeypatch.setattr(Trainer, name, wait)
    spec = make_spec(output, "ahead")
    assert train_spec(spec).status == "complete"
    assert curve(spec) == reference


def test_it_reports_to_nobody(tmp_path, monkeypatch):
    """In a pod of Kubeflow's the Trainer would, also where it is told not to."""
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1")
    assert arguments(make_spec(tmp_path, "quiet"), tmp_path, 1).report_to == []
