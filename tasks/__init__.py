"""The runtime layer: Flyte tasks, and below `tasks.runtime` what they call, free of Flyte."""

import logging

# For every field of the spec whose type it cannot name, flytekit warns that a workflow could not take it out of a promise.
# No workflow here does: the spec travels whole.
logging.getLogger("flytekit").addFilter(
    lambda record: "cannot be converted to a literal type" not in record.getMessage()
)
