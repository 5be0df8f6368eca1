"""What is done at the end of a step, whatever the framework."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.checkpoint import manifest
from tasks.runtime.checkpoint.writer import CheckpointWriter
from tasks.runtime.objectives import next_token, target_tokens
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.folder import RunFolder
from tasks.runtime.training.early_stopping import EarlyStopping
from tasks.runtime.training.job import Job
from tasks.runtime.training.step_guard import RollBack, StepGuard
from tests.runtime.helpers.train_forked import launch
from tests.runtime.helpers.train_only import train_spec


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
    with pytest.raises(ValueError, match=r"step 1: the weights are no longer finite.*max_grad_norm above 0"):
        train_spec(spec)
    assert checkpoint.latest(RunFolder.of(spec).checkpoints) is None
    assert not RunFolder.of(spec).record.exists()


def test_a_process_that_is_late_goes_back_to_what_the_others_do(tmp_path, monkeypatch):
    """What the checkpoint notes is read once and handed out: the main process may have changed it by now."""
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    manifest.commit(folder, {}, {"guard": {"losses": [], "skips": 0, "passed_over": []}})
    processes, spec = Processes(), RunSpec.model_validate({"faults": {"nonfinite": "rollback"}})

    def on_main(call):
        """As on a late process: the main one has done its part, and the next one, too."""
        value = call()
        manifest.update_metadata(folder, {"guard": {"losses": [], "skips": 0, "passed_over": [(10, 3)]}})
        return value

    monkeypatch.setattr(Processes, "on_main", lambda self, call: on_main(call))
    told = []
    job = SimpleNamespace(
        spec=spec,
        objective=SimpleNamespace(rolled_back=lambda: told.append("objective")),
        watchdog=SimpleNamespace(expect=lambda *arguments: None),
        writer=CheckpointWriter(tmp_path, None, None, processes, keep_last=2, metadata={}),
        recorder=SimpleNamespace(rolled_back=lambda: None),
        guard=StepGuard(spec.faults, spec.nonfinite, processes, {}),
        processes=processes,
        early_stopping=EarlyStopping(spec.evaluation, {}),
        load=lambda folder: None,
    )
    job._newest_checkpoint = partial(Job._newest_checkpoint, job)
    Job._roll_back(job, RollBack(13, "the loss is nan"))
    assert job.guard.data_skips == [(10, 3)] and told == ["objective"]


@pytest.mark.parametrize("framework", ["torch", "hf", "lightning"])
def test_the_head_is_spared_what_predicts_nothing(tmp_path, monkeypatch, framework):
    """Every micro-batch comes to its loss with a number of its own targets, which no loss depends on."""
    seen = []
    share = next_token.NextToken.micro_batch_loss

    def watch(self, model, batch, items, max_targets=None):
        seen.append((int(target_tokens(batch)), batch["labels"].numel(), max_targets))
        return share(self, model, batch, items, max_targets if watching else None)

    monkeypatch.setattr(next_token.NextToken, "micro_batch_loss", watch)
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


def test_all_processes_end_answers_with_the_tokens_of_generation_config(tmp_path):
    """Only rank 0 reads the weights, and with them transformers reads generation_config.json."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "max_new_tokens": 5}))
    launch(tmp_path, module="tests.runtime.helpers.end_tokens_of_ranks")
