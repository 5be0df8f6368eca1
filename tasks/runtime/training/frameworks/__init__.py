"""What drives the training loop: one file for each value of `runtime.framework`, each a `Framework` called `train`."""

from __future__ import annotations

from importlib import import_module

from strata_platform.spec import RunSpec
from tasks.runtime.training.job import Framework


def load_framework(spec: RunSpec) -> Framework:
    """The framework that `runtime.framework` names; the others are not loaded."""
    train: Framework = import_module(f"{__name__}.{spec.runtime.framework}").train
    return train
