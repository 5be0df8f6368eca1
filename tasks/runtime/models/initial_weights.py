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
from safetensors import safe_open
from torch import Tensor

from strata_platform.spec.run_spec import Adapter
from strata_platform.spec.sections.model import Model

# Key of the digest in a checkpoint's metadata.
_KEY = "initial_weights"
# Values of a row that are read.
_VALUES = 256


def initial_weights(model: Model, adapter: Adapter) -> dict[str, str]:
    """Metadata for checkpoints: a digest of the names, shapes and some values of the weights in the folder.

    {} if the model is not in a local folder, or has an adapter, whose checkpoints have `base_fingerprint`.
    """
    folder = Path(model.name)
    if adapter.type != "none" or model.from_scratch or not folder.is_dir():
        return {}
    whole, digest = folder / "model.safetensors", hashlib.sha256()
    # In the order of transformers, which reads no shards beside a whole file.
    paths = [whole] if whole.is_file() else list(folder.glob("model-*.safetensors"))
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(str(path), framework="pt")) for path in paths]
        # However the tensors are spread over files.
        tensors = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name, held in sorted(tensors.items()):
            digest.update(f"{name} {held.get_slice(name).get_shape()}".encode())
            digest.update(_some_values(held, name).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return {_KEY: digest.hexdigest()[:16]} if files else {}


def require_initial_weights(model: Model, adapter: Adapter, metadata: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder has other weights than when the run of the checkpoint with `metadata` began."""
    expected, found = metadata.get(_KEY), initial_weights(model, adapter).get(_KEY)
    if None not in (expected, found) and expected != found:
        raise ValueError(
            f"model.name {model.name!r} has other weights than those that this run began with, and the run would "
            "not use them; restore them to continue, or choose another name to train from the new ones"
        )


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
