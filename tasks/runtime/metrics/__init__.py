"""Metrics of a run and their outputs: `metrics.jsonl`, progress lines, MFU, trackers."""
