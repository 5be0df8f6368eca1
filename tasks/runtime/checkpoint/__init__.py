"""Checkpoints: their contents, their manifest, the writer that saves them during training, the upload to a store."""

from tasks.runtime.checkpoint.manifest import discard_after, folders, latest, metadata_of, step_of, update_metadata

__all__ = ["discard_after", "folders", "latest", "metadata_of", "step_of", "update_metadata"]
