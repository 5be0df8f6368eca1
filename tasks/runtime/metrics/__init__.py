"""What is measured while a run trains, and who is told: `metrics.jsonl`, progress lines, MFU, trackers."""
