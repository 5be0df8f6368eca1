"""Training loops: one file for each value of `runtime.framework`, with a `Framework` called `train`."""

from __future__ import annotations

from importlib import import_module

from tasks.runtime.training.job import Framework


def load_framework(name: str) -> Framework:
    """Import the framework of the `runtime.framework` called `name`, and no other."""
    train: Framework = import_module(f"{__name__}.{name}").train
    return train
