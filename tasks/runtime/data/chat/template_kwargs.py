"""What a row passes to the chat template beside its messages and tools: the column `chat_template_kwargs`, as TRL reads
it, such as `{"enable_thinking": false}`.

Null values are dropped, as in tools: columnar files give every row the keys of all rows.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

from strata_platform.spec.sections.data import Data
from tasks.runtime.data.chat.tools import COLUMN as TOOLS
from tasks.runtime.data.chat.tools import drop_nulls
from tasks.runtime.data.reading.rows import Row, RowError, describe_type

COLUMN = "chat_template_kwargs"
_INSTEAD = {
    TOOLS: f"give them in a column {TOOLS!r}",
    "chat_template": "set data.chat_template",
    "add_generation_prompt": "leave it out: a prompt is rendered with it, and a whole chat without",
}


def template_kwargs_of(row: Row, data: Data) -> dict[str, Any]:
    """What the row passes to the chat template, an object or a JSON string of one. Raises RowError."""
    given = None if COLUMN in data.ignore_columns else row.fields().get(COLUMN)
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError(f"{row.where}: column {COLUMN!r} is not valid JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(
            f"{row.where}: column {COLUMN!r} holds {describe_type(given)}, not an object or a JSON string of one; "
            f"correct it, or name {COLUMN!r} in data.ignore_columns"
        )
    found: dict[str, Any] = drop_nulls(value)
    for name in found:
        if name in _arguments():
            instead = _INSTEAD.get(name, "leave it out, because templates do not read it")
            raise RowError(f"{row.where}: column {COLUMN!r} has {name!r}; {instead}")
    return found


@cache
def _arguments() -> frozenset[str]:
    """Arguments of transformers' functions, which templates do not get; they do get documents."""
    # The pod that plans a run imports this module, and waits for no transformers.
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset((*taken, "conversations", "messages")) - {"documents", "kwargs"}
