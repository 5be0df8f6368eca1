"""What a user runs: one file per workflow. A workflow only wires tasks together."""
