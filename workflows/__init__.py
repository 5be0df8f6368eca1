"""What a user runs: one file per workflow. A workflow only wires tasks together."""

from tasks.parameters import read_files_as_strata_does

read_files_as_strata_does()
