"""The runtime layer: Flyte tasks, and below `tasks.runtime` what they call, free of Flyte.

The tasks import the runtime inside their functions: registering a workflow and starting an elastic agent need neither
transformers nor the seconds that it takes to load.
"""

import logging

# flytekit looks for a Flyte type for every field of the spec and the record, so that a workflow could take one out of
# a promise, and warns where it finds none, as for `dict[str, Any]`. No workflow here does: they travel whole, as
# msgpack, never as a pickle. A pickle of any other type is still warned of.
_FIELD_TYPES = ("cannot be converted to a literal type", "Unsupported Type typing.Any found")
logging.getLogger("flytekit").addFilter(lambda record: not any(text in record.getMessage() for text in _FIELD_TYPES))

# accelerate imports DeepSpeed wherever it is installed, which then tells what it found on a machine without a GPU.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
