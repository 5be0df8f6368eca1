"""The runtime layer: Flyte tasks, and below `tasks.runtime` what they call, free of Flyte.

The tasks import the runtime inside their functions: registering a workflow and starting an elastic agent need neither
transformers nor the seconds that it takes to load.
"""

import logging

# flytekit looks for a Flyte type for every field of the spec and the record, so that a workflow could take one out of
# a promise, and warns where it finds none. No workflow here does: they travel whole, as msgpack, never as a pickle.
_FIELD_TYPES = ("cannot be converted to a literal type", "Flyte will default to use PickleFile")
logging.getLogger("flytekit").addFilter(lambda record: not any(text in record.getMessage() for text in _FIELD_TYPES))
