"""A short run to its last step, under observation. Several checks read its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strata_kernels import join_weight
from strata_platform.spec import RunSpec
from tasks.runtime.checkpoint.flat_shard import local_values
from tasks.runtime.data.dataset import Batch, document_of
from tasks.runtime.models.adapters.lora import add_adapter
from tasks.runtime.models.build import build_model
from tasks.runtime.models.dropout import turn_dropout_off
from tasks.runtime.models.trained_weights import collect_weights
from tasks.runtime.objectives.objective import model_inputs, without_varlen_inputs
from tasks.runtime.optim.gradients import used_gradient
from tasks.runtime.optim.library_optimizers import averaged_weights
from tasks.runtime.optim.lr_schedule import set_learning_rate
from tasks.runtime.optim.optimizer import build_optimizer
from tasks.runtime.optim.state_tensors import REMAINDER
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.frameworks import load_framework
from tasks.runtime.training.job import Job
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train
from tasks.runtime.verification.subject import Subject, changed

STEPS = 4
# Tokens of the text whose logits are compared.
TOKENS = 64


@dataclass
class Updates:
    """The changes of the weights, compared with the same gradients applied to fp32 weights."""

    arrived: float = 0.0
    """Share of the fp32 update that reached the weights: the projection onto it; 1 if nothing is lost."""
    moved: float = 0.0
    """Share of the weights that changed."""
    moved_exactly: float = 0.0
    """The same share for fp32 weights."""
    without_gradient: list[str] = field(default_factory=list)
    """Trainable parameters whose gradients were zero in every step."""
    frozen_moved: list[str] = field(default_factory=list)
    """Frozen parameters that changed."""


@dataclass
class Trained:
    """A finished run."""

    spec: RunSpec
    record: CompletionRecord
    weights: Path
    """The folder that `collect_weights` wrote."""
    inputs: Batch
    """A short text, or a chat with images or audio."""
    logits: Tensor
    """Logits of the job's model after the last step: [1, T, V], fp32, on the CPU."""
    updates: Updates


def trained(subject: Subject) -> Trained:
    """The short run of a subject, which trains once."""
    if "trained" not in subject.kept:
        subject.kept["trained"] = _train(subject)
    found: Trained = subject.kept["trained"]
    return found


def _train(subject: Subject) -> Trained:
    # DeepSpeed keeps fp32 master weights. This run has one process, without DeepSpeed, so its weights are fp32.
    dtype = torch.float32 if subject.asked.parallel.type == "deepspeed" else subject.weights_dtype
    spec = subject.variant(
        model={"dtype": str(dtype).removeprefix("torch.")},
        training={"steps": STEPS},
        schedule={"type": "constant", "warmup_ratio": 0.0},
        optimizer={"in_backward": False},
    )
    watch = _Watch(spec)
    with session(spec) as run:
        record = train(run, subject.data, watch)
    return Trained(
        spec, record, collect_weights(run.folder, spec.adapter, record), watch.inputs, watch.logits, watch.updates
    )


class _Watch:
    """Trains with the spec's framework, and repeats every step in fp32 with the same gradients."""

    inputs: Batch
    logits: Tensor

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.updates = Updates()
        self._seen_gradient: set[str] = set()
        self._done = 0

    def __call__(self, job: Job) -> None:
        turn_dropout_off(job.unwrapped_model)
        self._before = {name: parameter.detach().clone() for name, parameter in job.unwrapped_model.named_parameters()}
        self._exact = _exact_copy(job.unwrapped_model, self._spec)
        self._optimizer = build_optimizer(self._exact, changed(self._spec, {"model": {"dtype": "float32"}}))
        clip = job.clip_gradients
        vars(job)["clip_gradients"] = lambda: self._step(job, clip)
        load_framework(self._spec.runtime.framework)(job)
        self._compare(job)
        with averaged_weights(job.optimizer):
            self.inputs, self.logits = _logits(job)

    def _step(self, job: Job, clip: Any) -> Tensor | None:
        norm: Tensor | None = clip()
        copies = dict(self._exact.named_parameters())
        for name, parameter in job.unwrapped_model.named_parameters():
            gradient = used_gradient(parameter, job.optimizer)
            if gradient is not None:
                copies[name].grad = gradient.float()
                if gradient.any():
                    self._seen_gradient.add(name)
        set_learning_rate(self._optimizer, job.learning_rate(self._done))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1
        return norm

    def _compare(self, job: Job) -> None:
        copies, found = dict(self._exact.named_parameters()), self.updates
        product = square = 0.0
        moved = moved_exactly = total = 0
        for name, parameter in job.unwrapped_model.named_parameters():
            before = self._before[name]
            if not parameter.requires_grad:
                if not torch.equal(before, parameter):
                    found.frozen_moved.append(name)
                continue
            if name not in self._seen_gradient:
                found.without_gradient.append(name)
            update = most_exact(job.optimizer, parameter).double() - before.double()
            expected = copies[name].detach().double() - before.double()
            product += float((update * expected).sum())
            square += float(expected.square().sum())
            moved += int((update != 0).sum())
            moved_exactly += int((expected != 0).sum())
            total += update.numel()
        found.arrived = product / square if square else float("nan")
        found.moved, found.moved_exactly = moved / max(1, total), moved_exactly / max(1, total)


def most_exact(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """The parameter that the next step reads: the fp32 master weight if the optimizer keeps low bits."""
    state: dict[str, Tensor] = optimizer.state.get(parameter, {})
    weight = local_values(parameter).detach()
    return join_weight(weight, local_values(state[REMAINDER])) if REMAINDER in state else weight


def _exact_copy(model: PreTrainedModel, spec: RunSpec) -> PreTrainedModel:
    """The same modules in fp32, with the current weights of `model`."""
    copy = build_model(spec.model, spec.seed, dtype=torch.float32)
    add_adapter(copy, spec.adapter, spec.seed)
    copy.to(model.device)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(weights[name].requires_grad)
            if weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
    return copy


@torch.no_grad()
def _logits(job: Job) -> tuple[Batch, Tensor]:
    row = document_of(job.data.train[0], 0)
    if "media" not in row:
        # The tokens of an image or audio are not cut.
        row = {name: tensor[:TOKENS] for name, tensor in row.items()}
    batch: Batch = job.collate([row])
    inputs = {name: tensor.to(job.processes.device) for name, tensor in model_inputs(batch).items()}
    job.model.eval()
    logits: Tensor = job.model(**inputs).logits
    kept = model_inputs(batch) if "media" in row else {"input_ids": batch["input_ids"]}
    return without_varlen_inputs(kept), logits.float().cpu()
