"""Splits by the names of files and folders, as in a copy of a Hub dataset.

Examples: `train.jsonl`, `gsm8k_test.csv`, `validation/0.parquet`, and `data/train_sft-00000-of-00003.parquet`, which
belongs to the split `train_sft`.
"""

from __future__ import annotations

import re

from tasks.runtime.data.reading.readers import extension

# Words at the start or end of a name, as in the package `datasets`.
_SPLIT_NAMES = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_WORDS = "|".join(_SPLIT_NAMES)
_WORD = re.compile(rf"^({_WORDS})(?![^\W\d_])|(?<![^\W\d_])({_WORDS})[\W\d_]*$")
_SHARD = re.compile(rf"data/((?:{_WORDS})_\w+)-\d{{5}}-of-\d{{5}}")
# Files of a dataset that hold no rows, and those in which `datasets` keeps the results of `map`.
_METADATA_FILES = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
_CACHE = re.compile(r"cache-[0-9a-f]+.*\.arrow")


def is_data_file(path: str) -> bool:
    """Whether a file, by its path in the folder, may hold rows: neither hidden, nor metadata, nor a cache."""
    file = path.rpartition("/")[2]
    return not is_hidden(path) and file not in _METADATA_FILES and _CACHE.fullmatch(file) is None


def is_hidden(path: str) -> bool:
    """Whether a file, by its path in the folder, is hidden, or in a hidden folder below it."""
    return any(part.startswith((".", "__")) for part in path.split("/"))


def is_hidden_from(pattern: str, path: str) -> bool:
    """Whether a path that matches a glob is hidden, or in a hidden folder, without being named by it.

    As in the package `datasets`: a pattern names what is hidden by a part that begins as its name does.
    """

    def hidden(one: str) -> tuple[int, int]:
        *folders, file = one.split("/")
        dotted = sum(part.startswith(".") and bool(part.strip(".")) for part in (*folders, file))
        return dotted, sum(part.startswith("__") for part in folders)

    return hidden(path) != hidden(pattern)


def split_name(path: str) -> str | None:
    """The split in the name of a path, or None."""
    if shard := _SHARD.match(path):
        return shard[1]
    *folders, file = path.lower().split("/")
    for name in (*folders, file[: file.rfind(extension(file))]):
        if word := _WORD.search(name):
            return _SPLIT_NAMES[word[1] or word[2]]
    return None


def files_of_split(paths: list[str], split: str, folder: str) -> list[str]:
    """The paths that belong to the split; all paths if no name contains a split.

    Raises ValueError when the split has no files, or when only some of the names contain a split.
    """
    by_split: dict[str | None, list[str]] = {}
    for path in paths:
        by_split.setdefault(split_name(path), []).append(path)
    unmatched = by_split.pop(None, [])
    if not by_split:
        return paths
    found = ", ".join(f"{name!r} ({abbreviate(files)})" for name, files in by_split.items())
    pattern = f"give a glob of the files to train on, such as {folder.rstrip('/')}/**/*{_ending(paths[0])} for all"
    if unmatched:
        raise ValueError(
            f"file names contain the splits {found}, but the names {abbreviate(unmatched)} contain none; {pattern}"
        )
    wanted = _SPLIT_NAMES.get(split, split)
    if wanted not in by_split:
        raise ValueError(
            f"data.split is {split!r}, but file names contain the splits {found}; set it to one of them, or {pattern}"
        )
    return by_split[wanted]


def abbreviate(paths: list[str]) -> str:
    """The first three paths, and the number of further ones."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3:,} more" if len(paths) > 3 else "")


def _ending(path: str) -> str:
    return path[path.lower().rfind(extension(path)) :]
