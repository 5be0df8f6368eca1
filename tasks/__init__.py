"""Flyte tasks, and the runtime that they call, `tasks.runtime`, which does not know Flyte.

The tasks import the runtime inside their functions: registering a workflow and starting an elastic agent should not
wait seconds for transformers.
"""

import logging

# flytekit looks for a Flyte type for every field of the spec and the record, so that a workflow could read one from a
# promise, and warns if there is none, as for `dict[str, Any]`. Our workflows pass these objects whole, as msgpack.
# Other types still cause the warning. Messages are read as flytekit wrote them: one has an argument too many.
_FIELD_TYPES = ("cannot be converted to a literal type", "Unsupported Type typing.Any found")
# flytekit keeps its clients of the object store until the process ends, and then logs each as an error.
_NOT_LOGGED = (*_FIELD_TYPES, "Unclosed client session")
logging.getLogger("flytekit").addFilter(lambda record: not any(text in str(record.msg) for text in _NOT_LOGGED))

# accelerate imports DeepSpeed wherever it is installed, which then logs what it found on a machine without a GPU.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())

# torchao registers two enums in a way that torch deprecates: two warnings in each process, about nothing of yours.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant()" not in record.getMessage())
