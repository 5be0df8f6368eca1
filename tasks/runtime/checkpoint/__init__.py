"""Checkpoints: what they hold, how they are written while training goes on, and which of them are whole."""

from tasks.runtime.checkpoint.manifest import amend, discard_after, facts_of, folders, latest, step_of

__all__ = ["amend", "discard_after", "facts_of", "folders", "latest", "step_of"]
