"""Trains specs in turn and stops there: `python -m tests.runtime.helpers.train_only [--narrow] SPEC[@STEP]...`.

Alone or under torchrun; of its preset `narrow_preset` where that is asked for.

With a step, what the run did after it is forgotten before: its later checkpoints, and that it was complete. Layers are
compiled as far as the graphs that torch's compiler then makes C++ of, which alone would take half a minute.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

import torch

from strata_platform.spec import DataRecipe, load_spec
from tasks.runtime import checkpoint
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.process.log import configure_logging
from tasks.runtime.run_folder.folder import RunFolder, data_folder
from tasks.runtime.training.session import session
from tasks.runtime.training.train import train
from tests.runtime.helpers.narrow_preset import narrow


def forget(spec, step):
    """Leave of a run what it had when `step` was done."""
    checkpoint.discard_after(RunFolder.of(spec).checkpoints, step)
    RunFolder.of(spec).record.unlink()


def train_spec(spec, step=None):
    """Train as the launched processes do."""
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    with session(spec) as run:
        if step is not None:
            run.processes.on_main(lambda: forget(spec, step))
        return train(run, prepare(recipe, data_folder(spec.output, recipe), report=print))


def train_all(arguments, ports=()):
    """Train each `SPEC[@STEP]` in turn.

    ports: one for each process group. On the port of the last one, a rank could still find the store of the last group.
    """
    configure_logging()
    torch.compile = partial(torch.compile, backend="aot_eager")
    narrowed = arguments[0] == "--narrow"
    with narrow() if narrowed else nullcontext():
        for number, argument in enumerate(arguments[1:] if narrowed else arguments):
            if ports:
                os.environ["MASTER_PORT"] = str(ports[number])
            file, _, step = argument.partition("@")
            train_spec(load_spec(file), int(step) if step else None)


if __name__ == "__main__":
    train_all(sys.argv[1:])
