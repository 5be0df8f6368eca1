"""Evaluate a model: validation loss, samples, lm-evaluation-harness tasks."""
