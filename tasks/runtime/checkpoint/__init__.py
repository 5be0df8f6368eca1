"""Checkpoints: their contents, their manifest, the writer that saves them during training, the upload to a store."""

from tasks.runtime.checkpoint.manifest import (
    BEST_STEP,
    PREFIX,
    discard_after,
    folders,
    latest,
    metadata_of,
    newest_step,
    step_of,
    update_metadata,
    verification_error,
)

__all__ = [
    "BEST_STEP",
    "PREFIX",
    "discard_after",
    "folders",
    "latest",
    "metadata_of",
    "newest_step",
    "step_of",
    "update_metadata",
    "verification_error",
]
