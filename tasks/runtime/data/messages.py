"""The messages of a chat, as rows hold them: OpenAI's with `role` and `content`, or ShareGPT's with `from` and `value`."""

from __future__ import annotations

from typing import Any

from tasks.runtime.data.rows import Row, RowError, describe_type, require_valid_unicode
from tasks.runtime.data.tools import called_functions, drop_nulls

# Roles by the values of `from` in ShareGPT's messages.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
          "tool": "tool"}  # fmt: skip

Messages = list[dict[str, Any]]


def messages_of(row: Row, column: str) -> Messages:
    """The checked messages of a row, without null values and empty lists of tool calls. Raises RowError.

    ShareGPT's messages with `from` and `value`, and contents that are lists of text parts, are converted to `role` and
    a string as `content`.
    """
    value = row.value(column)
    if not isinstance(value, list):
        raise RowError(f"{row.where}: column {column!r} holds {describe_type(value)}, not a list of messages")
    if not value:
        raise RowError(f"{row.where}: column {column!r} holds no message")
    messages = []
    for number, message in enumerate(value, start=1):
        where = f"{row.where}: message {number}"
        if not isinstance(message, dict):
            raise RowError(f"{where} is {describe_type(message)}, not an object with role and content")
        message = {key: item for key, item in message.items() if item is not None and (key, item) != ("tool_calls", [])}
        message = _with_text(_with_role(message, where))
        if "tool_calls" in message:
            message["tool_calls"] = drop_nulls(message["tool_calls"])
            called_functions(message["tool_calls"], where)
        if not isinstance(message.get("role"), str):
            raise RowError(f"{where}: role is {describe_type(message.get('role'))}, not text{_other_keys(message)}")
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str):
            raise RowError(f"{where}: content is {describe_type(message.get('content'))}, not text")
        require_valid_unicode(message.get("content", ""), f"{where}: content")
        _require_weight(message, where)
        messages.append(message)
    return messages


def _with_role(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert `{"from": "human", "value": ...}` to `role` and `content`. Raises RowError for an unknown `from`."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    author = message["from"]
    if not isinstance(author, str) or author not in _ROLES:
        raise RowError(f"{where}: from is {author!r}; it may be {', '.join(map(repr, _ROLES))}")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    return {"role": _ROLES[author], "content": message["value"], **others}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Join a content that is a list of text parts."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts or not all(map(_is_text, parts)):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _is_text(part: Any) -> bool:
    # Columnar files give every part the keys of all parts, with null values.
    held = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
    return held.keys() == {"type", "text"} and held["type"] == "text" and isinstance(held["text"], str)


def _other_keys(message: dict[str, Any]) -> str:
    """The end of the error message for a message without a role: the keys that it has."""
    if "role" in message:
        return ""
    return f"; a message has role and content, this one {', '.join(map(repr, message)) or 'nothing'}"


def _require_weight(message: dict[str, Any], where: str) -> None:
    """Raise RowError for a `weight` other than 0 or 1, or on a message that is not the assistant's."""
    weight, role = message.get("weight", 0), message["role"]
    if weight not in (0, 1):
        raise RowError(f"{where}: weight is {weight!r}; set it to 1 to train on the message, or to 0 for context only")
    if weight == 1 and role != "assistant":
        raise RowError(
            f"{where}: weight is 1 and role is {role!r}, but only the assistant's messages carry loss; leave weight out"
        )
