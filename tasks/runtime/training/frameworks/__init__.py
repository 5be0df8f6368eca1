"""Training loops: one file for each value of `runtime.framework`, with a `Framework` called `train`."""

from __future__ import annotations

from importlib import import_module

from strata_platform.spec import RunSpec
from tasks.runtime.training.job import Framework


def load_framework(spec: RunSpec) -> Framework:
    """Import the framework that `runtime.framework` names, and no other."""
    train: Framework = import_module(f"{__name__}.{spec.runtime.framework}").train
    return train
