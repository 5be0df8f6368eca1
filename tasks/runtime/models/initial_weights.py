"""The weights of `model.name` that a run began with, told from those that are there now.

A run of the whole model reads them at its first start alone: later ones continue with those of its checkpoint. Without
a check, such a run would go on, or be complete, as if it had begun with weights that were put there since.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils import CONFIG_NAME, cached_file

from strata_platform.spec.sections.model import Model
from tasks.runtime.data.reading.sources import is_commit
from tasks.runtime.models.pretrained import readable
from tasks.runtime.models.weight_files import open_tensors, some_values
from tasks.runtime.process.errors import Unreachable

log = logging.getLogger(__name__)


def initial_weights(model: Model) -> str | None:
    """What tells the weights of `model.name` from others: a digest of those in a local folder, or the Hub's commit.

    None if they are random, or if the Hub does not tell the commit.

    Raises ValueError if a file of weights cannot be read.
    """
    if model.from_scratch:
        return None
    return _digest(model.name) if Path(model.name).is_dir() else _commit(model)


def require_initial_weights(model: Model, expected: str | None, *, compare_folder: bool = True) -> None:
    """Raises ValueError if the folder has other weights than when the run began and `initial_weights` was `expected`.

    Warns of another commit on the Hub, which may have the same weights.

    compare_folder: whether to compare weights in a local folder.
    """
    local = Path(model.name).is_dir()
    if expected is None or (local and not compare_folder):
        return
    found = initial_weights(model)
    if found is None or found == expected:
        return
    if local:
        raise ValueError(
            f"model.name {model.name!r} has other weights than those that this run began with; restore them to "
            "continue, or choose another name to train from the new ones"
        )
    if is_commit(expected):
        began, way_out = f"commit {expected} of the Hub, which has {found} now", f"set model.revision to {expected}"
    else:
        began, way_out = f"a local folder, which is gone, and the Hub has commit {found}", "restore the folder"
    log.warning(
        "model.name %r: this run began with %s. Its checkpoints keep the weights that it trains; frozen weights of an "
        "adapter's model, the tokenizer and the model before training are read from the new commit. To read the first "
        "ones, %s; to train from the new ones, choose another name",
        model.name,
        began,
        way_out,
    )


def _commit(model: Model) -> str | None:
    """The commit that `model.revision` means on the Hub now; offline, in the cache."""
    if model.revision is not None and is_commit(model.revision):
        return model.revision
    try:
        with readable(model.name):
            file = cached_file(model.name, CONFIG_NAME, revision=model.revision)
    except (ValueError, Unreachable) as error:
        log.info("the commit of model.name %r is unknown: %s", model.name, error)
        return None
    # The cache has a folder for each commit.
    commit = Path(file).parent.name
    return commit if is_commit(commit) else None


def _digest(source: str) -> str | None:
    """A digest of the names, shapes and some values of the weights in a folder; None if it has none."""
    digest = hashlib.sha256()
    with readable(source), ExitStack() as opened:
        tensors = open_tensors(Path(source), opened)
        for name, held in sorted(tensors.items()):
            digest.update(f"{name} {held.get_slice(name).get_shape()}".encode())
            digest.update(some_values(held, name).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if tensors else None
