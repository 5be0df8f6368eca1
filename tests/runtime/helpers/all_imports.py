"""Import what training processes do, some of it when they come to it: for processes that are forked then."""

from importlib import import_module
from typing import get_args

from strata_platform.spec.run_spec import Runtime


def import_everything():
    for framework in get_args(Runtime.model_fields["framework"].annotation):
        import_module(f"tasks.runtime.training.frameworks.{framework}")
    import_module("datasets")
    import_module("tests.runtime.helpers.train_only")
