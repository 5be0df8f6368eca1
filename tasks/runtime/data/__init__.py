"""The data package: `prepare` writes a folder from a recipe, `PreparedData` reads it, `collator` makes batches.

    recipe = recipe_of(spec)
    data = prepare(recipe, Path("out/finetune/data"), report=print)
    DataLoader(data.train, batch_size=8, collate_fn=collator(spec.model.attention))

Names that need torch or transformers are imported when they are first used: a task that only plans needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata_platform.spec.local_files import require_local_files
from strata_platform.spec.stages import require_no_stages
from tasks.runtime.data.fingerprint import fingerprint, recipe_of
from tasks.runtime.data.prepared_manifest import Manifest, Sample

if TYPE_CHECKING:
    from tasks.runtime.data.dataset import (
        PreparedData,
        ReferenceLogProbs,
        RowDataset,
        collate,
        collate_flat,
        collator,
    )
    from tasks.runtime.data.growing_mixture import open_prepared
    from tasks.runtime.data.pipeline import prepare

__all__ = [
    "Manifest",
    "PreparedData",
    "ReferenceLogProbs",
    "RowDataset",
    "Sample",
    "collate",
    "collate_flat",
    "collator",
    "fingerprint",
    "open_prepared",
    "prepare",
    "recipe_of",
    "require_local_files",
    "require_no_stages",
]

_MODULES = {"open_prepared": "growing_mixture", "prepare": "pipeline"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'dataset')}"), name)
    globals()[name] = value
    return value
