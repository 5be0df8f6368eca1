"""Training without Flyte: `python -m tasks.runtime SPEC`."""
