"""Tools in chats: those that a row offers, and the calls in its messages.

Columnar files give every object the keys of all: what one call has no argument for is null there. Such nulls are taken
away, or a model would learn to write them. Arguments and tools that are JSON texts stay as they are; where the template
would write such arguments in quotes, as many do whose models call with objects, the row is refused.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.runtime.data.rows import Row, RowError, describe_type

# Chats that call tools have them in a column of this name on the Hub.
COLUMN = "tools"

Tools = list[dict[str, Any]]


def tools_of(row: Row) -> Tools | None:
    """The tools that a row's chat offers, from a list or the JSON text of one; None when there are none.

    Raises RowError when they are anything else.
    """
    value = row.fields().get(COLUMN)
    tools = _parsed(row, value) if isinstance(value, str) and value.strip() else drop_nulls(value or None)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{row.where}: column {COLUMN!r} holds {describe_type(value)}, not a list of objects or the JSON text of one; give "
            "the column another name if it is not about the tools that a chat offers"
        )
    return tools


def _parsed(row: Row, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{row.where}: column {COLUMN!r} is not valid JSON: {error}") from error


def drop_nulls(value: Any) -> Any:
    """The value without the keys, at any depth, that hold null."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def called_functions(calls: Any, where: str) -> list[str]:
    """Names of the functions that a message's `tool_calls` call. Raises RowError when one has none."""
    if not isinstance(calls, list):
        raise RowError(f"{where}: tool_calls is {describe_type(calls)}, not a list of calls")
    names = [_name(call) for call in calls]
    for call, name in zip(calls, names, strict=True):
        if not isinstance(name, str) or not name:
            raise RowError(f"{where}: tool_calls has {describe_type(call)}, which names no function")
    return names


def is_double_encoded(call: Any, written: str) -> bool:
    """Whether `written` has the call's arguments, the JSON text of an object, as JSON once more: no model calls so."""
    arguments = call.get("function", call).get("arguments")
    if not isinstance(arguments, str) or not arguments.lstrip().startswith("{"):
        return False
    # As templates write it.
    return json.dumps(arguments, ensure_ascii=False) in written


def offered_functions(tools: Tools) -> list[str]:
    """Names of the functions among the tools; those of other kinds may have none."""
    return [name for name in map(_name, tools) if isinstance(name, str)]


def _name(tool: Any) -> Any:
    """Of `{"function": {"name": ...}}`, or of the tool or call itself."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
