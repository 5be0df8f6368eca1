"""The completion record of a finished run: steps, losses, throughput, data, kernels and versions."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from strata_platform.spec import RunSpec
from strata_platform.spec.run_spec import Checkpoint
from tasks.runtime import checkpoint
from tasks.runtime.data import PreparedData
from tasks.runtime.data.loader import DataSkip, spans_read
from tasks.runtime.data.mixture import source_shares
from tasks.runtime.extensions.own_code import objective_code
from tasks.runtime.metrics import startup
from tasks.runtime.metrics.progress import report_progress
from tasks.runtime.metrics.recorder import throughput, utilization
from tasks.runtime.models.custom_code import model_code
from tasks.runtime.models.float8 import FLOAT8
from tasks.runtime.objectives.training_step import TrainingStep
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.metrics_file import read_evaluations, read_points
from tasks.runtime.run_folder.record import CompletionRecord, Evaluated
from tasks.runtime.training.early_stopping import EarlyStopping
from tasks.runtime.warmup.warmup_metadata import WarmupMetadata

if TYPE_CHECKING:
    from tasks.runtime.training.session import Session

log = logging.getLogger(__name__)


def write_record(
    run: Session,
    data: PreparedData,
    parameters: tuple[int, int],
    step: TrainingStep,
    steps: int,
    attempt: int,
    warmup: WarmupMetadata,
    callbacks: dict[str, str],
) -> CompletionRecord:
    """Build the record from the run's metrics and its last checkpoint, and write it to the run's folder. Runs on rank
    0.

    `parameters`: the number of all parameters, and of the trainable ones. `callbacks`: digests of their code.
    """
    latest = checkpoint.folders(run.folder.checkpoints)[-1]
    done, metadata = checkpoint.step_of(latest), checkpoint.metadata_of(latest)
    # An earlier attempt may have gone further, if evaluation.early_stopping_patience is lower now.
    points = [point for point in read_points(run.folder.metrics) if point.step <= done]
    early = EarlyStopping(run.spec.evaluation, metadata)
    stopped = early.is_over and done < steps
    skips = [(step, steps) for step, steps in metadata.get("guard", {}).get("passed_over", ())]
    record = CompletionRecord(
        status="complete" if done == points[-1].step and (done == steps or stopped) else "incomplete",
        name=run.spec.name,
        spec_hash=run.spec.hash(),
        steps=done,
        steps_asked=steps,
        stopped_early=stopped,
        tokens=points[-1].tokens,
        target_tokens=points[-1].target_tokens,
        train_loss=next((point.loss for point in reversed(points) if not point.skipped), points[-1].loss),
        loss_unit=step.objective.unit,
        checkpoint=str(final_checkpoint(run.spec.checkpoint, latest)),
        best_step=early.best_step or None,
        evaluations=tuple(
            Evaluated(step=point.step, loss=point.loss, metrics=dict(point.metrics), samples=point.samples)
            for point in read_evaluations(run.folder.metrics)
            if point.step <= done
        ),
        restarts=attempt,
        skipped_steps=sum(point.skipped for point in points),
        rollbacks=len(skips),
        seconds=sum(point.step_seconds for point in points),
        tokens_per_second=throughput(points),
        mfu=utilization(points),
        data_wait_seconds=sum(point.data_wait_seconds for point in points),
        peak_memory_bytes=max(point.memory_bytes for point in points),
        parameters=parameters[0],
        trainable_parameters=parameters[1],
        device=device_name(run.processes),
        world_size=run.processes.world_size,
        data=_counts(data),
        sources=source_shares(data.manifest, run.spec.data.weights, _rows_read(run.spec, done, skips)),
        kernels=dict(step.patched.counts) if step.patched else {},
        float8=metadata.get(FLOAT8, {}),
        begun=startup.begun(),
        startup=startup.seconds([point for point in points if point.attempt == attempt]),
        warmup=warmup.to_dict(),
        versions=versions(),
        code=objective_code(run.spec.objective) | _code(data) | callbacks | model_code(run.spec.model),
    )
    record.save(run.folder.record)
    for share in record.sources:
        log.info("read of %s", share)
    if stopped:
        report_progress(stopped_early=done)
    return record


def final_checkpoint(settings: Checkpoint, latest: Path) -> Path:
    """The checkpoint whose model is evaluated and exported: `latest`, or the best with
    `checkpoint.load_best_model_at_end`.

    Raises ValueError if the best one is not there or not complete.
    """
    best = checkpoint.metadata_of(latest).get(checkpoint.BEST_STEP)
    if not settings.load_best_model_at_end:
        return latest
    if best is None:
        raise ValueError(
            f"checkpoint.load_best_model_at_end: {latest} does not say which checkpoint is the best, because "
            "checkpoint.keep_best was off while it was trained, or no validation loss was finite; set "
            "checkpoint.load_best_model_at_end to false to take the last one"
        )
    folder = latest.parent / f"{checkpoint.PREFIX}{best}"
    reason = checkpoint.verification_error(folder) if folder.exists() else "it is missing"
    if reason is not None:
        raise ValueError(
            f"checkpoint.load_best_model_at_end: the best checkpoint, {folder}, cannot be used: {reason}; restore it, "
            "or set checkpoint.load_best_model_at_end to false to take the last one"
        )
    return folder


def _code(data: PreparedData) -> dict[str, str]:
    """Digests of the code of formats when the data was prepared, by its name in the spec."""
    manifests = data.manifest.sources or (data.manifest,)
    return {each.format: each.versions[each.format] for each in manifests if each.format in each.versions}


def _counts(data: PreparedData) -> dict[str, int]:
    """Counts of samples: each sample that was read is either used or skipped for one reason."""
    manifest = data.manifest
    return {
        "read": manifest.samples_read,
        "used": manifest.samples_used,
        **{f"skipped_{reason}": number for reason, number in manifest.skipped.items()},
        "truncated": manifest.truncated,
        "train_rows": manifest.train.rows,
        "train_tokens": manifest.train.tokens,
        "train_target_tokens": manifest.train.target_tokens,
        "validation_rows": manifest.validation.rows,
        "validation_target_tokens": manifest.validation.target_tokens,
    }


def device_name(processes: Processes) -> str:
    """The device's name as its vendor gives it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(processes.device)
    return f"CPU ({torch.get_num_threads()} threads)"


def versions() -> dict[str, str]:
    """Versions of everything that can change the results."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in ("strata", "torch", "triton", "transformers", "accelerate", "lightning", "peft", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source"
    for optional in ("bitsandbytes", "deepspeed", "lm-eval"):
        with suppress(PackageNotFoundError):
            found[optional] = version(optional)
    return found


def _rows_read(spec: RunSpec, done: int, skips: Sequence[DataSkip]) -> list[tuple[int, int]]:
    """Positions of the rows that the run has read after `done` steps, as (first, last + 1)."""
    steps = spans_read(done, 1, skips)
    return [(round(first / spec.steps_per_row), round(last / spec.steps_per_row)) for first, last in steps]
