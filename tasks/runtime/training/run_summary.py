"""The lines of the log that describe a run before its first step."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel

from strata_platform.spec.sections.training import Training
from tasks.runtime import checkpoint
from tasks.runtime.data import PreparedData
from tasks.runtime.data.mixture import source_shares
from tasks.runtime.models.adapters.lora import describe_experts
from tasks.runtime.models.attention.flash_attention_4 import usable_version
from tasks.runtime.models.attention.recurrent_layers import describe_recurrent_layers, missing_fast_paths
from tasks.runtime.objectives.training_step import TrainingStep
from tasks.runtime.optim.rounding import has_bfloat16
from tasks.runtime.training.completion import device_name
from tasks.runtime.training.session import Session

log = logging.getLogger(__name__)


def log_sources(run: Session, data: PreparedData, steps: int) -> None:
    """Log the share of each source in the run."""
    if not run.processes.is_main:
        return
    if data.rows is None:
        # How many rows each has, and so how often it repeats, is known at the end.
        for source in run.spec.data.sources:
            log.info("source %s: weight %s, rows are still being prepared", ", ".join(source.names), source.weight)
        return
    for share in source_shares(data.manifest, run.spec.data.weights, [(0, round(steps / run.spec.steps_per_row))]):
        log.info("source %s", share)


def log_summary(run: Session, step: TrainingStep, steps: int, rows: int | None, resume_from: Path | None) -> None:
    """Log the model, its kernels and the steps, and warn of settings that have no effect."""
    if not run.processes.is_main:
        return
    model, patched = step.model, step.patched
    log.info(
        "model %s, %.1f M parameters, %s, on %d x %s",
        run.spec.model.name,
        model.num_parameters() / 1e6,
        str(model.dtype).removeprefix("torch."),
        run.processes.world_size,
        device_name(run.processes),
    )
    if run.spec.adapter.type != "none":
        learning = model.num_parameters(only_trainable=True)
        log.info("adapter: %s, %.2f M parameters are trained", run.spec.adapter.type, learning / 1e6)
        if line := describe_experts(model, run.spec.adapter, patched):
            log.info(line)
    if run.spec.optimizer.paged and run.processes.device.type == "cpu":
        log.warning("optimizer.paged has no effect without a GPU: moments are in ordinary memory")
    if run.spec.training.activation_offloading and run.processes.device.type == "cpu":
        log.warning("training.activation_offloading has no effect without a GPU: activations are in host memory")
    if step.dropout_off:
        log.info("dropout: off in the model and its adapter, because %s compares answers", run.spec.objective.type)
    if step.varlen:
        by = f", by flash-attn-4 {flash_4}" if (flash_4 := usable_version(model.config)) else ""
        log.info("attention: varlen, without masks%s", by)
    if line := describe_recurrent_layers(model):
        log.log(logging.WARNING if missing_fast_paths(model) else logging.INFO, "recurrent layers: %s", line)
    unfused = patched is not None and not patched.replaced
    log.log(logging.WARNING if unfused else logging.INFO, "kernels: %s", patched.summary() if patched else "off")
    if patched is not None and patched.by_structure:
        log.info("kernels: %s", patched.proof_summary())
    log.info(
        "training: %d steps of %d rows (up to %s tokens), gradient accumulation %d, framework %s",
        steps,
        run.spec.rows_per_step,
        f"{run.spec.rows_per_step * run.spec.data.sequence_length:,}",
        run.spec.training.gradient_accumulation_steps,
        run.spec.runtime.framework,
    )
    _log_gradient_sums(run.spec.training, model)
    counts = {"checkpoint": run.spec.checkpoint.per_epoch, "evaluation": run.spec.evaluation.per_epoch}
    if rows is not None and (given := {section: count for section, count in counts.items() if count}):
        epoch = rows * run.spec.steps_per_row
        shown = ", ".join(f"{section}s {count}" for section, count in given.items())
        log.info("per epoch of %.6g steps: %s", epoch, shown)
        for section, count in given.items():
            if epoch / count > steps:
                log.warning(
                    "%s.per_epoch: after %.6g steps for the first time, and the run has %d; set %s.every for %ss "
                    "before its end", section, epoch / count, steps, section, section,
                )  # fmt: skip
    if resume_from:
        log.info("continuing after step %d (%s)", checkpoint.step_of(resume_from), resume_from)


def _log_gradient_sums(training: Training, model: PreTrainedModel) -> None:
    steps = training.gradient_accumulation_steps
    in_bfloat16 = has_bfloat16([parameter for parameter in model.parameters() if parameter.requires_grad])
    if training.sums_in_float32 and in_bfloat16:
        log.info("gradients of the %d micro-batches of a step are added in float32", steps)
    elif (given := training.gradient_accumulation_dtype) != "auto" and (steps == 1 or not in_bfloat16):
        why = "a step has one micro-batch" if in_bfloat16 else "no trainable weight is bfloat16"
        log.warning("training.gradient_accumulation_dtype %r has no effect: %s", given, why)
