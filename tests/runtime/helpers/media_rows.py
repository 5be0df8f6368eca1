"""Rows with images or audio: prepare them, and see what the prepared rows hold."""

from __future__ import annotations

import json

import torch

from strata_platform.spec import DataRecipe, RunSpec
from tasks.runtime.data import fingerprint, prepare
from tasks.runtime.data.dataset import MEDIA_COLUMNS


def asked(mark=""):
    """The messages of a question, which has `mark` in front, and its answer."""
    return [{"role": "user", "content": f"{mark}Which?"}, {"role": "assistant", "content": "4"}]


def prepare_rows(folder, model, rows, objective="sft", name="rows.jsonl", **data):
    """The prepared data of rows, by default one to a row; of the file `name` in the folder if `rows` is None."""
    if rows is not None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = RunSpec.model_validate({
        "model": {"name": str(model)}, "objective": {"type": objective},
        "data": {"source": str(folder / name), "packing": False, "validation_fraction": 0} | data,
    })  # fmt: skip
    recipe = DataRecipe.from_spec(spec, fingerprint(spec))
    return prepare(recipe, folder / "data" / recipe.hash(), report=print, processes=1)


def files_of(row):
    """The bytes of a row's images or audio, in order."""
    if "media" not in row:
        return []
    content, sizes, _ = (row[name] for name in MEDIA_COLUMNS)
    return [file.numpy().tobytes() for file in content.split(sizes.tolist())]


def by_number(data):
    """The rows of three with one image or audio, with none, and with two."""
    none, one, two = sorted(data.train, key=lambda row: len(files_of(row)))
    return one, none, two


def packed(rows):
    """One row of several."""
    joined = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "labels", "position_ids")}
    media = {name: torch.cat([row[name] for row in rows if "media" in row]) for name in MEDIA_COLUMNS[:2]}
    counts = [row.get("document_media", torch.tensor([0])) for row in rows]
    return joined | media | {MEDIA_COLUMNS[2]: torch.cat(counts)}
