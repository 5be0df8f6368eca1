"""Tools in chats: the tools that a row offers, and the tool calls in its messages.

Columnar files give every object the keys of all objects, so an argument that a call does not have is null. These nulls
are dropped, or a model would learn to write them. Arguments and tools that are JSON strings stay strings. A function
that is offered without the object around it gets it: with servers, the model will see no other form. If the chat
template would render such arguments in quotes, as many templates for calls with objects do, the row is rejected.
"""

from __future__ import annotations

import json
from typing import Any

from tasks.runtime.data.reading.rows import Row, RowError, describe_type

# Datasets on the Hub have the tools of a chat in a column of this name.
COLUMN = "tools"

Tools = list[dict[str, Any]]


def tools_of(row: Row) -> Tools | None:
    """The tools that a row's chat offers, a list or a JSON string of one; None without tools. Raises RowError."""
    value = row.fields().get(COLUMN)
    tools = _parsed(row, value) if isinstance(value, str) and value.strip() else drop_nulls(value or None)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{row.where}: column {COLUMN!r} holds {describe_type(value)}, not a list of objects or a JSON string of "
            "one; rename the column if it does not hold the tools of a chat"
        )
    return [_as_served(tool) for tool in tools]


def _as_served(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as servers pass it to the template: a bare function, as in ShareGPT data with tools, gets its type."""
    is_bare = isinstance(tool.get("name"), str) and tool.keys().isdisjoint(("type", "function"))
    return {"type": "function", "function": tool} if is_bare else tool


def _parsed(row: Row, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{row.where}: column {COLUMN!r} is not valid JSON: {error}") from error


def drop_nulls(value: Any) -> Any:
    """The value without keys, at any depth, whose value is null."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def parsed_calls(calls: Any, what: str) -> Any:
    """Calls of tools, parsed if they are JSON, as in tables. Raises RowError, which names them as `what`."""
    if not isinstance(calls, str):
        return calls
    try:
        return json.loads(calls)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not valid JSON: {error}; it begins {calls[:40]!r}") from error


def called_functions(calls: Any, where: str) -> list[str]:
    """Names of the functions in a message's `tool_calls`. Raises RowError for a call without a name."""
    if not isinstance(calls, list):
        raise RowError(f"{where}: tool_calls is {describe_type(calls)}, not a list of calls")
    names = [_name(call) for call in calls]
    for call, name in zip(calls, names, strict=True):
        if not isinstance(name, str) or not name:
            raise RowError(f"{where}: tool_calls has {describe_type(call)}, which names no function")
    return names


def is_double_encoded(call: Any, written: str) -> bool:
    """Whether `written` contains the call's arguments, a JSON string, encoded as JSON a second time."""
    arguments = call.get("function", call).get("arguments")
    if not isinstance(arguments, str) or not arguments.lstrip().startswith("{"):
        return False
    # Jinja's `tojson` in chat templates does not escape non-ASCII characters.
    return json.dumps(arguments, ensure_ascii=False) in written


def offered_functions(tools: Tools) -> list[str]:
    """Names of the functions among the tools; tools of other types may have no name."""
    return [name for name in map(_name, tools) if isinstance(name, str)]


def _name(tool: Any) -> Any:
    """The name in `{"function": {"name": ...}}` or `{"name": ...}`."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
