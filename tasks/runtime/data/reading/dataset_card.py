"""Configurations and splits by the card of a folder, its README.md, as in a copy of a Hub dataset.

The card's YAML names the files of each split, under any name, and may keep several data sets in one folder:

    configs:
    - config_name: main
      data_files:
      - {split: train, path: main/train-*}
      - {split: test, path: main/test-*}

The package `datasets` reads it the same way, from the Hub and from a folder.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any, NamedTuple

import yaml
from fsspec.utils import glob_translate

from tasks.runtime.data.reading.rows import suggestion

CARD = "README.md"
_BLOCK = re.compile(r"\A\ufeff?---\s*\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
# The block is at the beginning; what follows it may have any length.
_MOST_BYTES = 1 << 20


class Configuration(NamedTuple):
    """One data set of a folder: its name, and patterns of files by split; None if the files' names tell the splits.

    folder: what the patterns start from, relative to the card. default: it is taken if none is named.
    """

    name: str
    files: dict[str, list[str]] | None
    folder: str
    default: bool


def read_configurations(filesystem: Any, folder: str) -> list[Configuration]:
    """The configurations that the card of a folder lists; empty without a card, or if it lists none.

    Raises ValueError if they cannot be read.
    """
    path = f"{folder.rstrip('/')}/{CARD}"
    if not filesystem.exists(path):
        return []
    with filesystem.open(path, "rb") as file:
        text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    block = _BLOCK.match(text.replace("\r\n", "\n"))
    if block is None or "configs:" not in block[1]:
        return []
    try:
        listed = (yaml.safe_load(block[1]) or {}).get("configs") or []
        if not isinstance(listed, list):
            raise TypeError("they are not a list")
        return [_configuration(entry) for entry in listed]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the configurations in its {CARD} cannot be read: {reason}; correct them, or name the files to train on"
        ) from error


def choose_configuration(found: list[Configuration], subset: str | None) -> Configuration:
    """The configuration that `data.subset` names; without it the only one, or the default.

    Raises ValueError if there is no such one.
    """
    names = [one.name for one in found]
    listed = ", ".join(map(repr, names))
    if subset is not None:
        if subset not in names:
            raise ValueError(
                f"data.subset is {subset!r}, but its {CARD} lists the configurations {listed}"
                f"{suggestion(subset, names)}"
            )
        return found[names.index(subset)]
    chosen = found if len(found) == 1 else [one for one in found if one.default]
    if len(chosen) != 1:
        raise ValueError(
            f"the folder holds several data sets: its {CARD} lists the configurations {listed}; set data.subset to one "
            "of them, or name the files to train on"
        )
    return chosen[0]


def files_of_configuration(chosen: Configuration, paths: list[str], split: str) -> list[str]:
    """The paths, relative to the card, that belong to the split of a configuration with patterns.

    Raises ValueError if it has no such split, or a pattern matches none of the paths.
    """
    assert chosen.files is not None
    if split not in chosen.files:
        raise ValueError(
            f"data.split is {split!r}, but its {CARD} lists the splits {', '.join(map(repr, chosen.files))} of the "
            f"configuration {chosen.name!r}; set it to one of them"
        )
    found: dict[str, None] = {}
    for pattern in chosen.files[split]:
        matches = re.compile(glob_translate(posixpath.normpath(posixpath.join(chosen.folder, pattern)))).match
        matched = [path for path in paths if matches(path)]
        if not matched:
            raise ValueError(
                f"its {CARD} names files {pattern!r} for the split {split!r} of the configuration {chosen.name!r}, and "
                "there are none of a known format; download them, or name the files to train on"
            )
        found.update(dict.fromkeys(matched))
    return list(found)


def is_below(path: str, folder: str) -> bool:
    """Whether a path, relative to the card, is in a folder of it."""
    folder = posixpath.normpath(folder)
    return folder == "." or path.startswith(f"{folder}/")


def _configuration(entry: Any) -> Configuration:
    name = str(entry["config_name"])
    default = name == "default" or bool(entry.get("default"))
    return Configuration(name, _files(entry.get("data_files")), str(entry.get("data_dir") or "."), default)


def _files(given: Any) -> dict[str, list[str]] | None:
    """Patterns by split. Those without one are of the split `train`, as in `datasets`."""
    if not given:
        return None
    found: dict[str, list[str]] = {}
    for item in given if isinstance(given, list) else [given]:
        split, path = (item["split"], item["path"]) if isinstance(item, dict) else ("train", item)
        found.setdefault(str(split), []).extend(map(str, path if isinstance(path, list) else [path]))
    return found
