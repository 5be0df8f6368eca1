"""Which format a source has, by the columns of its first rows."""

from __future__ import annotations

from strata_platform.spec import DataRecipe
from strata_platform.spec.sections.data import Data
from strata_platform.spec.sections.objectives import LABELLED
from tasks.runtime.data.chat.prompt_template import prompt_shape
from tasks.runtime.data.formats.columns import PREFERENCES, Shape, columns_of, find_shape, known_shapes
from tasks.runtime.data.formats.own_format import is_own, own_columns
from tasks.runtime.data.formats.row_kind import TEXTS, holds_messages, require_known_objects
from tasks.runtime.data.formats.token_rows import COLUMN as TOKENS
from tasks.runtime.data.reading.rows import Row, RowError, suggestion

SEGMENTS = "segments"
"""Column of axolotl's `input_output`: texts, and whether they carry loss."""


def choose_format(recipe: DataRecipe, rows: list[Row]) -> tuple[str, tuple[str, ...]]:
    """Name and columns of the format of a source, judged by its first `rows`, at least one.

    `data.format: auto` takes the first format whose columns exist, in an order that depends on the objective.

    Raises:
        ValueError: a column is missing, no row is readable, or the format does not fit the objective.
    """
    data = recipe.data
    available = columns_of(rows)
    if not available:
        raise ValueError(f"data.source: none of the first {len(rows)} rows can be read; {_first_problem(rows)}")
    present = [column for column in available if column not in data.ignore_columns]
    if not present:
        raise ValueError(f"data.ignore_columns: no column is left of {', '.join(map(repr, available))}; remove one")
    if is_own(data.format):
        return data.format, own_columns(data, present)
    if data.template is not None:
        _require_columns(data, available)
        return _templated_shape(data, present, rows)
    shape = find_shape(data, recipe.objective, present)
    _require_columns(data, available)
    if shape is None:
        raise ValueError(
            f"data.format 'auto' recognizes none of the columns {', '.join(map(repr, present))}; "
            f"{_unknown_advice(recipe, present)}"
        )
    if shape.format == "tokens" and recipe.objective in LABELLED:
        raise ValueError(
            f"objective.type {recipe.objective!r} needs prompts and completions as texts or messages, but the data has "
            f"only token ids (column {shape.columns[0]!r})"
        )
    if shape.format == "text" and recipe.objective in ("sft", *LABELLED):
        raise ValueError(
            f"objective.type {recipe.objective!r} needs prompts and completions, but the data has only texts (column "
            f"{shape.columns[0]!r}); set objective.type to 'pretrain', or set data.prompt_column and "
            f"data.completion_column{_token_advice(recipe.objective, present)}"
        )
    if shape.format in TEXTS:
        for row in rows:
            require_known_objects(shape.format, shape.columns, row, data)
    return _as_chat(shape, rows, data)


def _unknown_advice(recipe: DataRecipe, present: list[str]) -> str:
    """What to do with columns that form no format, or none for the objective."""
    data = recipe.data
    chosen, rejected = data.chosen_column or "chosen", data.rejected_column or "rejected"
    if {chosen, rejected} <= {*present}:
        field = "completion_column" if (data.prompt_column or "prompt") in present else "messages_column"
        instead = (
            "give each answer a row of its own, with a label"
            if recipe.objective in LABELLED
            else f"set data.{field} to {chosen!r} to learn these answers alone"
        )
        return f"they hold pairs of answers: set objective.type to 'dpo' or another objective of pairs, or {instead}"
    if SEGMENTS in present:
        return (
            f"{SEGMENTS!r} holds parts of a text with a label each: give token ids, with labels of -100 for the parts "
            "without loss, or write a format of your own"
        )
    return (
        f"it looks for {known_shapes(data)}; set data.messages_column, data.prompt_column and data.completion_column, "
        "or data.text_column"
    )


def _token_advice(objective: str, present: list[str]) -> str:
    """What to do with texts that the data has beside their tokens, as `datasets.map` leaves them."""
    has_tokens = TOKENS in present and objective not in LABELLED
    return f"; to learn the token ids in column {TOKENS!r}, set data.format to 'tokens'" if has_tokens else ""


def _templated_shape(data: Data, present: list[str], rows: list[Row]) -> Shape:
    shape = prompt_shape(data, present)
    # Its questions may have any form.
    if _as_chat(shape._replace(columns=shape.columns[-1:]), rows, data).format != shape.format:
        raise ValueError(f"data.template renders texts, but column {shape.columns[-1]!r} holds messages; leave it out")
    return shape


def _require_columns(data: Data, available: list[str]) -> None:
    """Raise ValueError if a field of `data` names a column that does not exist."""
    for field in Data.model_fields:
        column = getattr(data, field) if field.endswith("_column") else None
        if column is not None and column not in available:
            raise ValueError(
                f"data.{field} {column!r}: the data has {', '.join(map(repr, available))}"
                f"{suggestion(column, available)}"
            )


def _as_chat(shape: Shape, rows: list[Row], data: Data) -> Shape:
    """Name and columns of the format, judged by the first row whose answer is not null: texts or messages.

    Raises ValueError when answers are texts and have no prompt.
    """
    if shape.format not in (*TEXTS, *PREFERENCES):
        return shape
    column = shape.columns[-2] if shape.format in PREFERENCES else shape.columns[-1]
    values = [row.values for row in rows if isinstance(row.values, dict) and row.values.get(column) is not None]
    if values and holds_messages(shape.format, shape.columns, values[0], data):
        chats = {"prompt_completion": "chat", "prompt": "prompt_chat"}
        return shape._replace(format=chats.get(shape.format, "preference_chat"))
    if shape.format in PREFERENCES and len(shape.columns) == 2:
        raise ValueError(
            f"the answers in column {column!r} are texts, but there is no column with their prompt; set "
            "data.prompt_column, or give answers as lists of messages"
        )
    return shape


def _first_problem(rows: list[Row]) -> str:
    try:
        rows[0].fields()
    except RowError as error:
        return str(error)
    return f"{rows[0].where}: it has no columns"
