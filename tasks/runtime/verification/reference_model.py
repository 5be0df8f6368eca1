"""Checks that the reference of preferences or a distillation's teacher is the model that the spec names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from strata_platform.spec.sections.objectives import WITH_REFERENCE
from strata_platform.spec.sections.objectives import Distill as DistillSettings
from strata_platform.spec.sections.objectives import Dpo as DpoSettings
from strata_platform.spec.sections.objectives import Kto as KtoSettings
from tasks.runtime.data.dataset import IGNORE_INDEX, Batch, Row
from tasks.runtime.models.build import build_model
from tasks.runtime.models.pretrained import load_pretrained
from tasks.runtime.objectives.distill import Distill
from tasks.runtime.objectives.dpo import Dpo
from tasks.runtime.objectives.kto import Kto
from tasks.runtime.training.job import Job
from tasks.runtime.verification.exact import error, scale
from tasks.runtime.verification.finding import Measured
from tasks.runtime.verification.observe import with_job
from tasks.runtime.verification.subject import Subject

# Limits of relative differences of log-probabilities and logits: the rounding error of a model in each dtype.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def does_not_apply(subject: Subject) -> str | None:
    """Why the check does not apply, or None."""
    objective = subject.spec.objective
    if objective.type in WITH_REFERENCE or getattr(objective, "teacher", None) is not None:
        return None
    return f"objective.type {objective.type!r} has no reference model and no teacher that runs"


def reference(subject: Subject) -> Measured:
    """Compare the reference or the teacher of the first step with the model by transformers alone."""
    found: list[tuple[float, str]] = []
    spec = subject.variant(training={"micro_batch_size": subject.micro_batch}, optimizer={"in_backward": False})
    look = _answers if spec.objective.type in WITH_REFERENCE else _teacher
    with_job(spec, subject.data, lambda job: found.append(look(job, subject)))
    figure, detail = found[0]
    return Measured(figure, _LIMITS[subject.computes_in], detail)


def _answers(job: Job, subject: Subject) -> tuple[float, str]:
    """Compare log-probabilities of answers before the first update, by the reference and the policy, with the base
    model's.
    """
    assert isinstance(job.objective, Dpo | Kto) and isinstance(job.spec.objective, DpoSettings | KtoSettings)
    batch = next(iter(job.loader()))
    plain = _plain(build_model(job.spec.model, job.spec.seed), subject)
    expected = torch.tensor([_log_probability(plain, row) for row in _documents(batch)])
    on_device = {name: tensor.to(job.processes.device) for name, tensor in batch.items()}
    ours = {"the policy's": job.objective.scores(job.model, on_device).cpu()}
    # One after the other, or chosen and rejected in turn; KTO's are those of mismatched answers, too.
    ours = {name: scores[: len(expected)] for name, scores in ours.items()}
    ours = {name: scores if scores.ndim == 1 else scores[:, 0] for name, scores in ours.items()}
    if "reference" in batch:
        begins = (batch["position_ids"] == 0) & (batch["sides"] != 0)
        ours["the reference's"] = batch["reference"][begins].double()
    else:
        job.objective.before_step(job.model, [batch], job.processes)
        share = job.objective.micro_batch_loss(job.model, on_device, job.objective.count(on_device)).metrics
        # The reference is the model without its adapter; rewards are the policy's distance from it.
        distance = (
            float(share["reward_chosen"].abs()) + float(share["reward_rejected"].abs())
        ) / job.spec.objective.beta
        ours["the reference's"] = ours["the policy's"] + distance
    worst = max(ours, key=lambda name: _apart(ours[name], expected))
    detail = (
        f"relative difference of the log-probabilities of {len(expected)} answers before the first step from those of "
        f"the base model, each answer alone; worst: {worst}"
    )
    return _apart(ours[worst], expected), detail


def _apart(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float(((found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)).max())


def _documents(batch: Batch) -> Iterator[Row]:
    """The answers of a batch, each with its prompt as a row of its own."""
    for index in range(batch["input_ids"].shape[0]):
        row = {
            name: tensor[index] for name, tensor in batch.items() if tensor.shape[:1] == batch["input_ids"].shape[:1]
        }
        begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], row["input_ids"].numel()], strict=True):
            if row["sides"][begin] != 0:
                yield {name: tensor[begin:end] for name, tensor in row.items()}


def _plain(model: PreTrainedModel, subject: Subject) -> PreTrainedModel:
    return model.to(subject.device).eval()


@torch.no_grad()
def _log_probability(model: PreTrainedModel, row: Row) -> float:
    """The log-probability of a document's labels, by the model's own forward pass."""
    logits = model(input_ids=row["input_ids"][None].to(model.device)).logits[0, :-1].float()
    labels = row["labels"][1:].to(model.device)
    learned = labels != IGNORE_INDEX
    values = log_softmax(logits, dim=-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return float(values.double().where(learned, 0.0).sum())


def _teacher(job: Job, subject: Subject) -> tuple[float, str]:
    """Compare the logits of the job's teacher with those of the model that the spec names."""
    assert isinstance(job.objective, Distill) and isinstance(job.spec.objective, DistillSettings)
    assert job.objective.teacher is not None and job.spec.objective.teacher is not None
    batch = {name: tensor.to(job.processes.device) for name, tensor in next(iter(job.loader())).items()}
    hidden, head = job.objective.teacher.run(batch)
    found = hidden if head.weight is None else hidden @ head.weight.T + (0.0 if head.bias is None else head.bias)
    name, revision = job.spec.objective.teacher, job.spec.objective.teacher_revision
    plain = load_pretrained(name, revision=revision, dtype=subject.computes_in)
    with torch.no_grad():
        inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
        expected: Tensor = _plain(plain, subject)(**inputs, use_cache=False).logits
    figure = error(found, expected) / scale([expected])
    return figure, f"relative difference of the teacher's logits from those of {name} by transformers"
