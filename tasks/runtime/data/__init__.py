"""The data package: `prepare` writes a folder from a recipe, `PreparedData` reads it, `collator` makes batches.

    recipe = recipe_of(spec)
    data = prepare(recipe, Path("out/finetune/data"), report=print)
    DataLoader(data.train, batch_size=8, collate_fn=collator(spec.model.attention))

Names that need torch or transformers are imported when they are first used: a task that only plans needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_platform.lazy_names import lazy_names
from strata_platform.spec.local_files import require_local_files
from strata_platform.spec.stages import require_no_stages
from tasks.runtime.data.preparation.fingerprint import fingerprint, recipe_of
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
    from tasks.runtime.data.preparation.pipeline import prepare

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

__getattr__ = lazy_names(
    __name__,
    {
        "dataset": ("PreparedData", "ReferenceLogProbs", "RowDataset", "collate", "collate_flat", "collator"),
        "growing_mixture": ("open_prepared",),
        "preparation.pipeline": ("prepare",),
    },
)
