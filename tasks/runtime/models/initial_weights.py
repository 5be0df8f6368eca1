"""The weights in a local folder `model.name`, told from others.

A run of the whole model reads them at its first start alone: later ones continue with those of its checkpoint. Without
a check, such a run would go on, or be complete, as if it had begun with weights that were put there since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Model
from tasks.runtime.models.pretrained import readable

# Key of the digest in a checkpoint's metadata.
_KEY = "initial_weights"
# Values of a row that are read.
_VALUES = 256


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
        tensors = _tensors(folder, opened)
        for name, held in sorted(tensors.items()):
            digest.update(f"{name} {held.get_slice(name).get_shape()}".encode())
            digest.update(_some_values(held, name).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
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


def _tensors(folder: Path, opened: ExitStack) -> dict[str, Any]:
    """The open file of each tensor that transformers reads: of one file, or of those that the index names."""

    def open_file(name: str) -> Any:
        return opened.enter_context(safe_open(str(folder / name), framework="pt"))

    if (folder / SAFE_WEIGHTS_NAME).is_file():
        whole = open_file(SAFE_WEIGHTS_NAME)
        return dict.fromkeys(whole.keys(), whole)
    if not (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return {}
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {name: open_file(name) for name in set(places.values())}
    return {name: files[place] for name, place in places.items()}


def _some_values(file: Any, name: str) -> Tensor:
    """Values of the first row of a tensor, of one in the middle, and of the last."""
    part = file.get_slice(name)
    count, *inner = part.get_shape() or [0]
    if not count:
        tensor: Tensor = file.get_tensor(name)
        return tensor.flatten()
    rows = sorted({0, count // 2, count - 1})
    # Of experts, a row is a matrix.
    rest = [slice(0, 1)] * (len(inner) - 1)
    return torch.cat([part[(slice(row, row + 1), *rest)].flatten()[:_VALUES] for row in rows])
