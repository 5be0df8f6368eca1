"""What a user runs: one file per workflow. A workflow only wires tasks together."""

import sys

# Pods import this package, too. They have no command line, and flytekit's takes long to import.
if "flytekit.clis.sdk_in_container.run" in sys.modules:
    from tasks.parameters import read_files_as_strata_does

    read_files_as_strata_does()
