"""Checks of a Hugging Face config.json that need no model: its form, and the sizes in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strata_platform.file_io import require_regular_file

# The largest value of each size. More is a mistake, and building such a model would take memory or hours.
_LARGEST = {
    "hidden_size": 10**6,
    "intermediate_size": 10**7,
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**5,
    "vocab_size": 10**8,
}


def read_config_file(file: Path) -> dict[str, Any]:
    """The object in a config.json.

    Raises ValueError if the file cannot be read, or if its sizes are not those of a model.
    """
    try:
        require_regular_file(file)
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    # ValueError: not UTF-8, or not JSON.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error or 'nested too deeply'}; fetch it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not an object with the model's settings")
    require_sizes(config, str(file))
    return config


def require_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if a size in a model's configuration is no size, or contradicts another.

    A model for more than text has the sizes of its language model in a part called `text_config`.
    """
    if problem := next(iter(_problems(config)), None):
        raise ValueError(f"{where}: {problem}; correct it, or fetch the file again")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        require_sizes(text, f"{where}, text_config")


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name, largest in _LARGEST.items():
        value = config.get(name)
        # Some models have a list with a size for each layer.
        for size in value if isinstance(value, list) else [value]:
            if size is not None and (type(size) is not int or not 1 <= size <= largest):
                yield f"{name} is {json.dumps(size, default=str)}, not a whole number from 1 to {largest}"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and heads % groups:
        yield f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
