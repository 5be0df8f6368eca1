"""The tensors in a local folder of weights, read in part."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

# Values of a row that are read.
_VALUES = 256


def open_tensors(folder: Path, opened: ExitStack, file: str = SAFE_WEIGHTS_NAME) -> dict[str, Any]:
    """The open file of each tensor that transformers reads: of `file`, or of those that the index of a model names."""

    def open_file(name: str) -> Any:
        return opened.enter_context(safe_open(str(folder / name), framework="pt"))

    if (folder / file).is_file():
        whole = open_file(file)
        return dict.fromkeys(whole.keys(), whole)
    if not (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return {}
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(places.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index.name} has no weight_map of tensors and their files") from error
    files = {name: open_file(name) for name in names}
    return {name: files[place] for name, place in places.items()}


def some_values(file: Any, name: str) -> Tensor:
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
