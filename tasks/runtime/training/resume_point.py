"""Where a run continues: its newest checkpoint, what is left to train after it, and which state fits this job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata_platform.spec import RunSpec
from tasks.runtime import checkpoint
from tasks.runtime.data import PreparedData
from tasks.runtime.extensions.own_code import CODE, warn_of_changed_code
from tasks.runtime.models.initial_weights import require_initial_weights
from tasks.runtime.process.ranks import Processes
from tasks.runtime.run_folder.record import CompletionRecord
from tasks.runtime.training.completion import final_checkpoint
from tasks.runtime.training.early_stopping import stopped_early
from tasks.runtime.training.session import Session

log = logging.getLogger(__name__)

PEAK_LR = "peak_lr"
"""Key, in a checkpoint's metadata, of the peak learning rate of its run."""


def find_resume_point(run: Session, data: PreparedData, steps: int) -> tuple[Path | None, CompletionRecord | None]:
    """The checkpoint to resume from, and the record if the run is complete. Removes what a killed save left.

    Runs on rank 0, which sends the result to the others.
    """
    root = run.folder.checkpoints
    # One or the other: each of them reads and digests the whole checkpoint.
    latest = checkpoint.latest(root) if run.uploader is None else run.uploader.download_latest()
    if latest and run.spec.checkpoint.resume == "never":
        raise ValueError(
            f"checkpoint.resume is 'never' but {run.folder.checkpoints} has checkpoints; "
            "set it to 'auto' to continue, choose another name, or remove the folder"
        )
    if latest and checkpoint.metadata_of(latest)["data_hash"] not in data.manifest.identities:
        raise ValueError(
            f"{latest} was trained on other rows than data.source{'s' if run.spec.data.sources else ''} "
            f"{data.manifest.source!r} gives now: its files, the tokenizer, the output of the chat template, Python or "
            "a package changed. Restore them, or the folder of "
            f"the prepared data, to continue that run, choose another name, or remove {run.folder.root}"
        )
    if latest:
        require_initial_weights(run.spec, run.folder.initial_weights_ids)
        warn_of_changed_code(run.spec.objective, checkpoint.metadata_of(latest).get(CODE, {}))
    done = checkpoint.step_of(latest) if latest else 0
    if (not latest or is_over(run, latest, steps)) and run.folder.record.exists():
        record = CompletionRecord.load(run.folder.record)
        # Of another end, if the run has another number of steps now, or lost its last checkpoint.
        same_end = (record.steps, record.steps_asked) == (done, steps)
        if record.status == "complete" and latest and same_end:
            # The folder may have moved since, and checkpoint.load_best_model_at_end may have changed.
            return latest, record.model_copy(update={"checkpoint": str(final_checkpoint(run.spec.checkpoint, latest))})
        if record.status == "complete" and not latest:
            raise ValueError(
                f"{run.folder.record} says that all {record.steps} steps are done, and {run.folder.checkpoints} has "
                "no complete checkpoint; restore it (the chart's `retention.checkpoints` removes old ones), choose "
                f"another name, or remove {run.folder.root}, its exported model included, to train again"
            )
    if not latest and run.folder.has_progress:
        log.warning("%s has recorded steps but no complete checkpoint: the run starts again", run.folder.root)
    checkpoint.discard_after(run.folder.checkpoints, done)
    if run.uploader is not None:
        run.uploader.discard_after(done)
        if latest:
            run.uploader.enqueue_pending(latest)
    run.folder.record.unlink(missing_ok=True)
    return latest, None


def with_rate_of_begun_run(spec: RunSpec, metadata: Mapping[str, Any]) -> RunSpec:
    """`spec` with the learning rate that its run began with, by its checkpoint's metadata; {} for a new run.

    A run without `optimizer.lr` keeps the default that it began with.
    """
    if not metadata or spec.optimizer.lr is not None:
        return spec
    # Checkpoints of earlier versions lack it. Since then, one default has become a tenth of what it was.
    lowered = spec.optimizer.type == "adafactor" and spec.adapter.type == "none" and not spec.model.from_scratch
    rate = metadata.get(PEAK_LR, spec.peak_lr * 10 if lowered else spec.peak_lr)
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": rate})})


def is_over(run: Session, latest: Path | None, steps: int) -> bool:
    """Whether nothing is left to train after the checkpoint `latest`."""
    if latest is None:
        return False
    return checkpoint.step_of(latest) >= steps or stopped_early(checkpoint.metadata_of(latest), run.spec.evaluation)


def same_rank_layout(metadata: Mapping[str, Any], processes: Processes) -> bool:
    """Whether each rank may use its own random states of a checkpoint: the job has the same size and tensor
    parallelism.
    """
    there = metadata["world_size"], metadata.get("copies", processes.tp_size)
    return there == (processes.world_size, processes.tp_size)
