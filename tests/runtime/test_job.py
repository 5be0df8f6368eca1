"""What is done at the end of a step, whatever the framework."""

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.folder import RunFolder
from tasks.runtime.job import Job
from tests.runtime.train_only import train_spec


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """The loss of the last step is finite, and no norm is computed: only the weights tell."""

    def ruin(job):
        next(job.model.parameters()).grad.fill_(torch.nan)

    monkeypatch.setattr(Job, "clip_gradients", ruin)
    spec = RunSpec.model_validate(
        {
            "output": str(tmp_path),
            "data": {"sequence_length": 64, "max_samples": 20},
            "training": {"steps": 1, "micro_batch_size": 1},
            "optimizer": {"max_grad_norm": 0},
            "runtime": {"framework": "torch"},
            "tracking": {"report_to": []},
        }
    )
    with pytest.raises(ValueError, match=r"step 1: the weights are not finite.*max_grad_norm above 0"):
        train_spec(spec)
    assert checkpoint.latest(RunFolder.of(spec).checkpoints) is None
    assert not RunFolder.of(spec).record.exists()
