"""Tasks of Flyte 2 around the steps of `tasks.steps`. They import no flytekit."""

import sys

# Pods import this package, too. They have no command line.
if "flyte.cli.main" in sys.modules:
    from tasks.flyte2.spec_parameter import read_files_as_strata_does

    read_files_as_strata_does()
