"""What is done at the end of a step, whatever the framework."""

import json

import pytest
import torch

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.folder import RunFolder
from tasks.runtime.job import Job
from tasks.runtime.objectives import next_token, target_tokens
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


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_the_head_is_spared_what_predicts_nothing(tmp_path, monkeypatch, framework):
    """Every micro-batch comes to its loss with a number of its own targets, which no loss depends on."""
    seen = []
    share = next_token.NextToken.share

    def watch(self, model, batch, items, max_targets=None):
        seen.append((int(target_tokens(batch)), batch["labels"].numel(), max_targets))
        return share(self, model, batch, items, max_targets if watching else None)

    monkeypatch.setattr(next_token.NextToken, "share", watch)
    losses = []
    for watching in (True, False):
        spec = RunSpec.model_validate(
            {
                "name": f"watching-{watching}".lower(),
                "output": str(tmp_path),
                "data": {"sequence_length": 64, "max_samples": 60},
                "training": {"steps": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
                "runtime": {"framework": framework},
                "tracking": {"report_to": []},
            }
        )
        train_spec(spec)
        points = [json.loads(line) for line in RunFolder.of(spec).metrics.read_text().splitlines()]
        losses.append([point["loss"] for point in points])
    assert len(seen) == 8 and len(set(seen)) > 2
    assert all(targets <= most <= targets + positions // 8 for targets, positions, most in seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
