"""Import what training processes do, some of it when they come to it: for processes that are forked then."""

from importlib import import_module
from typing import get_args

from strata_platform.spec.run_spec import Runtime
from tests.helpers.rendezvous_events import name_methods_cheaply


def import_everything():
    for framework in get_args(Runtime.model_fields["framework"].annotation):
        import_module(f"tasks.runtime.training.frameworks.{framework}")
    # What the Trainer, a strategy and a preset come to; the agent of a training task in Flyte.
    for name in ("datasets", "deepspeed", "transformers.models.llama.modeling_llama", "tasks.elastic"):
        import_module(name)
    import_module("tests.runtime.helpers.train_only")
    name_methods_cheaply()
    # The standard library is parsed once in a process, for four seconds.
    python_docs = import_module("tasks.runtime.data.reading.python_docs")
    python_docs.pairs()
    python_docs.digest()
