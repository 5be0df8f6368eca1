"""Numbers that rows give to their answers: KTO's label, 1 for a good answer and -1 for a bad one; and the margin of a
pair, by which the score of its chosen answer should be larger.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.objectives import LABELLED
from tasks.runtime.data.reading.rows import Row, RowError, describe_type, suggestion

if TYPE_CHECKING:
    from tasks.runtime.data.formats.documents import Document
    from tasks.runtime.data.formats.known_formats import ToDocuments

# Columns with KTO's label: TRL's; LLaMA-Factory's.
LABELS = ("label", "kto_tag")
MARGIN = "margin"

_GOOD, _BAD = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no")


def score_column(recipe: DataRecipe, present: list[str]) -> str | None:
    """The column with a number for each row, of those `present`; None if the objective reads none.

    Raises ValueError if the objective needs one, and there is none.
    """
    if recipe.objective == "reward":
        # A column that the spec names exists: `choose_format` has looked.
        return recipe.data.margin_column or (MARGIN if MARGIN in present else None)
    if recipe.objective not in LABELLED:
        return None
    names = LABELS if recipe.data.label_column is None else (recipe.data.label_column,)
    found = next((name for name in names if name in present), None)
    if found is None:
        raise ValueError(
            f"objective.type {recipe.objective!r} needs a column that says whether an answer is good, such as "
            f"{names[0]!r}, but the data has {', '.join(map(repr, present))}{suggestion(names[0], present)}; set "
            "data.label_column"
        )
    return found


def label_of(row: Row, column: str) -> float:
    """1 for a good and -1 for a bad answer. Raises RowError if the column says neither."""
    value = row.value(column)
    text = str(value).strip().lower()
    if isinstance(value, bool | int | float | str):
        if text in _GOOD:
            return 1.0
        if text in _BAD:
            return -1.0
    raise RowError(
        f"{row.where}: column {column!r} holds {describe_type(value)}; it must be true for a good answer and false for "
        "a bad one"
    )


def margin_of(row: Row, column: str) -> float:
    """The finite number in a column, 0 if it is null. Raises RowError if it is none."""
    value = row.value(column)
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RowError(f"{row.where}: column {column!r} holds {describe_type(value)}; a margin is a finite number")
    return float(value)


def with_scores(build: ToDocuments, column: str, *, paired: bool) -> ToDocuments:
    """Make `build` give each document the score of its row: its label, or with `paired` its margin."""
    score_of = margin_of if paired else label_of

    def documents(row: Row) -> list[Document]:
        score = score_of(row, column)
        return [replace(document, score=score) for document in build(row)]

    return documents
