"""What a user of Flyte 2 runs: one file per workflow, as in `workflows`."""
