"""The weights in a local folder `model.name`, told from others.

A run of the whole model reads them at its first start alone: later ones continue with those of its checkpoint. Without
a check, such a run would go on, or be complete, as if it had begun with weights that were put there since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.pretrained import readable
from tasks.runtime.models.weight_files import open_tensors, some_values

# Key of the digest in a checkpoint's metadata.
_KEY = "initial_weights"


def initial_weights(model: Model, adapter: Adapter) -> dict[str, str]:
    """Metadata for a run's checkpoints: a digest of the names, shapes and some values of the weights in the folder.

    {} if the model is not in a local folder, or has an adapter, whose checkpoints have `base_fingerprint`.

    Raises ValueError if a file of weights cannot be read.
    """
    folder = Path(model.name)
    if adapter.type != "none" or model.from_scratch or not folder.is_dir():
        return {}
    digest = hashlib.sha256()
    with readable(model.name), ExitStack() as opened:
        tensors = open_tensors(folder, opened)
        for name, held in sorted(tensors.items()):
            digest.update(f"{name} {held.get_slice(name).get_shape()}".encode())
            digest.update(some_values(held, name).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return {_KEY: digest.hexdigest()[:16]} if tensors else {}


def recorded_initial_weights(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What `initial_weights` was when the run of the checkpoint with `metadata` began; {} if it has none."""
    return {_KEY: metadata[_KEY]} if _KEY in metadata else {}


def require_initial_weights(model: Model, adapter: Adapter, metadata: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder has other weights than when the run of the checkpoint with `metadata` began."""
    expected, found = metadata.get(_KEY), initial_weights(model, adapter).get(_KEY)
    if None not in (expected, found) and expected != found:
        raise ValueError(
            f"model.name {model.name!r} has other weights than those that this run began with, and the run would "
            "not use them; restore them to continue, or choose another name to train from the new ones"
        )
